"""Figures of pipeline schedules, simulated or measured."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared.plots import COLORS, finish, new_axes
from shared.schedules import (
    Action,
    Schedule,
    Simulated,
    Span,
    chunks_of,
    micro_batches_of,
    most_in_flight,
    simulate,
)

_STYLES: dict[str, dict[str, Any]] = {
    "F": {"facecolor": COLORS[5], "edgecolor": "black", "linewidth": 0.5},
    "B": {"facecolor": COLORS[0], "edgecolor": "black", "linewidth": 0.5},
    "W": {"facecolor": "#f6d9a0", "edgecolor": "black", "linewidth": 0.5},
}
_LABELS = {"F": "forward", "B": "backward", "W": "weight gradients"}
_SPLIT_BACKWARD = "backward (in zero bubble, input gradients only)"
_LIGHTER: dict[str, dict[str, Any]] = {
    "F": {"facecolor": "#d3ecfa"},
    "B": {"facecolor": "#8fc1e3"},
    "W": {"facecolor": "#fbeed3"},
}
_IDLE: dict[str, Any] = {"facecolor": "#e4e4e4", "edgecolor": "none"}
_AXES_PT = 580  # about the width of the time axis
_SIZES_PT = (("small", 5.0), ("x-small", 4.2), ("xx-small", 3.5))  # of a label, and the width of one of its digits


def measured(stages: Sequence[Sequence[tuple[tuple, float, float]]]) -> Simulated:
    """Convert the measured actions of each stage, (action, began, ended) in seconds, to spans in ms."""
    return Simulated(
        [[Span(Action(*action), 1e3 * began, 1e3 * ended) for action, began, ended in spans] for spans in stages]
    )


def choice(name: str, chosen: Schedule) -> Figure:
    """Draw how a schedule runs if messages take no time, and write its bubble, activations and messages below."""
    run, stages, chunks = simulate(chosen), len(chosen), chunks_of(chosen)
    held = ", ".join(f"{most_in_flight(actions) / chunks:g}" for actions in chosen)
    messages = 2 * micro_batches_of(chosen) * (stages * chunks - 1)
    figure = schedule({name: run}, unit="times of a stage's forward of one micro-batch")
    figure.supxlabel(
        f"Bubble: {run.bubble_of_total:.1%} of the total time, {run.bubble_of_ideal:.1%} of the ideal time. "
        f"Messages: {messages:,} per step.\n"
        f"Activations at the peak: {held} (per stage; 1 is what a stage keeps for one micro-batch)",
        x=0.02,
        ha="left",
        fontsize="medium",
    )
    return figure


def impossible(name: str, why: str) -> Figure:
    """Draw only the reason why a schedule does not exist."""
    figure, axes = new_axes(9.0, 1.0)
    axes.set_axis_off()
    axes.text(0, 0.5, f"{name}: {why}", ha="left", va="center", wrap=True)
    return finish(figure)


def schedule(runs: dict[str, Simulated], unit: str = "ms") -> Figure:
    """Draw when each stage runs each action. All schedules share one time axis.

    The number in a bar is the micro-batch. The bars of a stage's later chunks are lighter. Gray is idle time,
    up to the end of the step.
    """
    rows = sum(len(run.stages) for run in runs.values())
    figure, axes = new_axes(9.0, 0.75 + 0.3 * rows + 0.35 * len(runs))
    y, ticks, drawn = 0.0, [], set()
    longest = max(run.total for run in runs.values())
    for name, run in runs.items():
        axes.text(0, y - 0.25, f" {name}", ha="left", va="bottom", weight="bold")
        every = [span for spans in run.stages for span in spans]
        sizes = {kind: _size([s for s in every if s.action.kind == kind], longest) for kind in "FBW"}
        for stage, spans in enumerate(run.stages):
            ticks.append((y + 0.4, f"stage {stage}"))
            axes.broken_barh([(0, run.total)], (y, 0.8), **_IDLE)
            bars: dict[tuple[str, bool], list[tuple[float, float]]] = {}
            for span in spans:
                kind, length, later = span.action.kind, span.ended - span.began, span.action.chunk > 0
                bars.setdefault((kind, later), []).append((span.began, length))
                if sizes[kind]:
                    ink = "white" if kind == "B" and not later else "black"
                    middle = span.began + length / 2
                    label = f"{span.action.micro_batch}"
                    axes.text(middle, y + 0.4, label, ha="center", va="center", color=ink, fontsize=sizes[kind])
            for (kind, later), alike in bars.items():  # One call for each bar would take seconds.
                axes.broken_barh(alike, (y, 0.8), **_STYLES[kind] | (_LIGHTER[kind] if later else {}))
            drawn |= set(bars)
            y += 1
        y += 0.9
    axes.set(xlabel=unit, ylim=(y - 0.7, -1.1), xlim=(0, longest))
    axes.set_yticks(*zip(*ticks, strict=True))
    kinds, has_chunks = {kind for kind, _ in drawn}, any(later for _, later in drawn)
    labels = _LABELS | ({"B": _SPLIT_BACKWARD} if "W" in kinds else {})
    patches = [Patch(**_STYLES[kind], label=label) for kind, label in labels.items() if kind in kinds]
    if has_chunks:
        patches += [Patch(**_STYLES[kind] | _LIGHTER[kind], label=f"{_LABELS[kind]}, later chunk") for kind in "FB"]
    patches.append(Patch(**_IDLE, label="idle"))
    axes.legend(handles=patches, frameon=False, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 1))
    return finish(figure)


def _size(spans: Sequence[Span], longest: float) -> str | None:
    """Return the font size of the labels in all bars of a kind: the largest one for which the shortest bar has room."""
    if not spans:
        return None
    shortest_pt = min(span.ended - span.began for span in spans) / longest * _AXES_PT
    digits = max(len(str(span.action.micro_batch)) for span in spans)
    return next((size for size, digit_pt in _SIZES_PT if shortest_pt > 1.5 + digit_pt * digits), None)
