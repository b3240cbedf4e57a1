"""Figure of the placements of all tensors of a split model, and of how far a change on one rank spreads."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from shared.plots import COLORS
from shared.plots.diagrams.drawing import Drawing
from shared.spmd.observed import PARTIAL, UNKNOWN, Seen

_CELL_IN, _ROW_IN = (0.4, 0.22), 0.25
_NAMES_IN, _PLACEMENT_IN = 2.75, 1.4
_SHORTER = {"attention.query_key_value": "query_key_value", "attention.project": "project"}


def placements(models: dict[str, Sequence[Seen]], title: str = "Change of each tensor, in percent") -> Figure:
    """Draw a row per tensor. For each model, it has one cell per rank, with the change in percent, and the placement.

    A cell without a change is white. The placement is framed if it shows that something is wrong: if it is unknown, or
    if a gradient is still partial.
    """
    first = next(iter(models.values()))
    ranks = len(first[0].changes)
    model_in = ranks * _CELL_IN[0] + 0.15 + _PLACEMENT_IN
    gap = len({each.is_gradient for each in first}) - 1
    drawing = Drawing(_NAMES_IN + model_in * len(models), 1.05 + _ROW_IN * (len(first) + gap), title)
    for index, (name, seen) in enumerate(models.items()):
        left, y = _NAMES_IN + index * model_in, 1.0
        drawing.text(left, 0.58, name, "heading", ha="left", weight="bold")
        for rank in range(ranks):
            drawing.text(left + (rank + 0.5) * _CELL_IN[0], 0.85, f"{rank}", "note")
        for number, each in enumerate(seen):
            y += _ROW_IN * (number > 0 and each.is_gradient and not seen[number - 1].is_gradient)
            if index == 0 and number == 0:
                drawing.text(left - 0.1, 0.85, "rank", "note", ha="right")
            if index == 0:
                drawing.text(left - 0.1, y + _CELL_IN[1] / 2, _short(each.name), "note", ha="right", size=9)
            _cells(drawing, left, y, each)
            y += _ROW_IN
    return drawing.finish()


def _cells(drawing: Drawing, left: float, y: float, seen: Seen) -> None:
    for rank, change in enumerate(seen.changes):
        owner = (rank,) if change >= 0.0005 else ()
        drawing.cell(left + rank * _CELL_IN[0], y, _percent(change) if owner else "0", owner, _CELL_IN)
    is_wrong = seen.placement == UNKNOWN or (seen.is_gradient and seen.placement == PARTIAL)
    frame = {"facecolor": "white", "edgecolor": COLORS[1], "boxstyle": "round,pad=0.1", "linewidth": 1.4}
    style = {"weight": "bold", "bbox": frame} if is_wrong else {}
    x = left + len(seen.changes) * _CELL_IN[0] + 0.15
    drawing.text(x, y + _CELL_IN[1] / 2, seen.placement, "note", ha="left", size=9, **style)


def _percent(change: float) -> str:
    # Small changes get another digit, so that the cells of a partial tensor do not look equal.
    return f"{100 * change:.1f}" if change >= 0.01 else f"{100 * change:.2f}"


def _short(name: str) -> str:
    for long, short in _SHORTER.items():
        name = name.replace(long, short)
    return name
