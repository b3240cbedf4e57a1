"""Figures of placements: those of all gradients of a split model, and what a partitioner sends."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from shared.plots import COLORS, LINES, finish, logarithmic, new_axes
from shared.plots.diagrams.drawing import Drawing
from shared.spmd.observed import PARTIAL, REPLICATE, UNKNOWN, Seen

_ROW_IN, _NAMES_IN, _MODEL_IN = 0.27, 2.75, 2.95
_SYMBOLS = {REPLICATE: "=", PARTIAL: "Σ", UNKNOWN: "?"}  # a shard has the symbol |
_SHORTER = {"attention.query_key_value": "query_key_value", "attention.project": "project"}


def placements(models: dict[str, Sequence[Seen]], title: str = "Placement of each gradient") -> Figure:
    """Draw a row per gradient. For each model, it has a symbol, the placement, and whether all ranks hold the same.

    The placement is framed if something is wrong: if it is unknown, or if a gradient is still partial.
    """
    rows = [each.name for each in next(iter(models.values())) if each.is_gradient]
    drawing = Drawing(_NAMES_IN + _MODEL_IN * len(models), 1.45 + _ROW_IN * len(rows), title)
    for row, name in enumerate(rows):
        drawing.text(_NAMES_IN - 0.1, 1.1 + _ROW_IN * row, _short(name), "note", ha="right", size=9)
    for index, (name, seen) in enumerate(models.items()):
        left = _NAMES_IN + index * _MODEL_IN
        drawing.text(left, 0.58, name, "heading", ha="left", weight="bold")
        drawing.text(left + 1.75, 0.84, "equal on all ranks?", "note", ha="left", size=9)
        gradients = [each for each in seen if each.is_gradient]
        for row, each in enumerate(gradients):
            _draw_row(drawing, left, 1.1 + _ROW_IN * row, each.placement)
    legend = "= replicated   | sharded   Σ partial: the ranks' values still have to be added up"
    drawing.text(0.15, 1.3 + _ROW_IN * len(rows), legend, "note", ha="left", size=9)
    return drawing.finish()


def _draw_row(drawing: Drawing, left: float, y: float, placement: str) -> None:
    frame = {"facecolor": "white", "edgecolor": COLORS[1], "boxstyle": "round,pad=0.1", "linewidth": 1.4}
    style = {"weight": "bold", "bbox": frame} if placement in (PARTIAL, UNKNOWN) else {}
    drawing.text(left + 0.08, y, _SYMBOLS.get(placement, "|"), weight="bold")
    drawing.text(left + 0.28, y, placement, "note", ha="left", size=9, **style)
    drawing.text(left + 1.75, y, "yes" if placement == REPLICATE else "no", "note", ha="left", size=9)


def _short(name: str) -> str:
    for long, short in _SHORTER.items():
        name = name.replace(long, short)
    return name


def sent_by_rows(measured_mb: dict[int, float], ways_mb: dict[str, dict[int, float]]) -> Figure:
    """Draw what a partitioner sent, by the rows of the activations, on lines of what single ways would send."""
    figure, axes = new_axes(6.0, 3.4)
    for index, (name, sent_mb) in enumerate(ways_mb.items()):
        style = {"color": COLORS[index], "linestyle": LINES[index], "linewidth": 1.8}
        axes.plot(list(sent_mb), list(sent_mb.values()), label=name, **style)
    points = {"color": "black", "marker": "o", "linestyle": "none", "markersize": 6}
    axes.plot(list(measured_mb), list(measured_mb.values()), label="your partitioner (measured)", **points)
    axes.set(xlabel="rows of the activations", ylabel="MB that a rank sends")
    logarithmic(axes)
    axes.legend(frameon=False)
    return finish(figure)
