"""Figures of ZeRO-3: when each unit has memory for its parameters, and the total of all units. Pure functions."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shared.memory.lifetimes import Lifetimes
from shared.plots import COLORS, HATCHES

_STYLES: dict[str, dict[str, Any]] = {  # the style of a bar, by state of the unit; the styles also differ in brightness
    "UNSHARDING": {"facecolor": "white", "hatch": HATCHES[1], "edgecolor": "black"},
    "UNSHARDED": {"facecolor": COLORS[5], "edgecolor": "black"},
}
_OWN = {"facecolor": COLORS[4], "hatch": HATCHES[2], "edgecolor": "black", "linewidth": 0.4}


def lifetimes(lives: dict[str, Lifetimes], own_bytes: int, expected_bytes: dict[str, float]) -> Figure:
    """Draw steps side by side, with the bytes of parameters after each operator above, and a row per unit below.

    Args:
        lives: The lifetimes of the units, by name of the step.
        own_bytes: The bytes of this rank's shards, which it always holds.
        expected_bytes: The peak according to the formula, including the shards, by name of the step.

    Raises:
        ValueError: If there is no step.
    """
    if not lives:
        raise ValueError("There is nothing to draw: give at least one step.")
    # The step with the most units decides the order of the rows.
    by_units = sorted(lives.values(), key=lambda life: -len(life.spans))
    units = list(dict.fromkeys(unit for life in by_units for unit in life.spans))
    size_in = (max(7.0, 1.0 + 2.7 * len(lives)), 2.6 + 0.24 * len(units))
    heights = [1.7, 0.24 * len(units)]
    figure, panels = plt.subplots(
        2, len(lives), figsize=size_in, height_ratios=heights, sharex="col", sharey="row", squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for (above, below), (name, life) in zip(panels.T, lives.items(), strict=True):
        above.set_title(name, fontsize=10, pad=16)
        _draw_total(above, life, own_bytes, expected_bytes[name])
        _draw_units(below, life, units)
        _draw_phases(above, below, life)
        below.set(xlabel="operators since the start of the step", xlim=(0, life.operators))
    panels[0][0].set(ylabel="parameters, MB", ylim=(0, 1.15 * max(expected_bytes.values()) / 1e6))
    panels[1][0].set_yticks(range(len(units)), units)
    panels[1][0].set_ylim(len(units) - 0.4, -0.6)
    seen = {span.state for life in lives.values() for spans in life.spans.values() for span in spans}
    states = [Patch(label=state, **style) for state, style in _STYLES.items() if state in seen]
    own = Patch(label="this rank's shards", **_OWN)
    figure.legend(handles=[own, *states], frameon=False, ncols=4, loc="outside lower center")
    plt.close(figure)
    return figure


def moments(life: Lifetimes) -> list[int]:
    """List the operators at which a unit changes its state."""
    return sorted({span.began for spans in life.spans.values() for span in spans})


def moment(life: Lifetimes, own_bytes: int, expected_bytes: float, at: int) -> Figure:
    """Draw one step as `lifetimes` does, with a line after one operator, and the state of each unit at that time."""
    held_mb = (own_bytes + life.total_bytes[at]) / 1e6
    title = f"operator {at}: {held_mb:.2f} MB"
    figure = lifetimes({title: life}, own_bytes, {title: expected_bytes})
    for axes in figure.axes:
        axes.axvline(at + 0.5, color="black", linewidth=1.6)
    for row, spans in enumerate(life.spans.values()):
        state = next(span.state for span in spans if span.began <= at < span.ended)
        transform = figure.axes[1].get_yaxis_transform()
        figure.axes[1].text(1.01, row, state, transform=transform, va="center", size=8)
    return figure


def _draw_total(axes, life: Lifetimes, own_bytes: int, expected_bytes: float) -> None:
    """Stack the unsharded parameters on this rank's shards, and mark the peak that the formula predicts."""
    own_mb = own_bytes / 1e6
    totals_mb = [own_mb + unsharded_bytes / 1e6 for unsharded_bytes in life.total_bytes]
    operators = range(life.operators + 1)
    axes.fill_between(operators, 0, [own_mb] * len(operators), **_OWN)
    stacked_mb = [*totals_mb, totals_mb[-1]]
    style = {"step": "post", "facecolor": COLORS[5], "edgecolor": "black", "linewidth": 0.6}
    axes.fill_between(operators, own_mb, stacked_mb, **style)
    axes.axhline(expected_bytes / 1e6, color="black", linestyle="--", linewidth=1.2)
    label = f"formula: {expected_bytes / 1e6:.2f} MB"
    axes.text(0.55 * life.operators, 1.02 * expected_bytes / 1e6, label, ha="center", va="bottom", size=8)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_units(axes, life: Lifetimes, units: list[str]) -> None:
    """Draw a bar where a unit has memory, in the style of its state."""
    for row, unit in enumerate(units):
        for span in life.spans.get(unit, []):
            if span.nbytes:
                style = _STYLES[span.state]
                axes.broken_barh([(span.began, span.ended - span.began)], (row - 0.38, 0.76), linewidth=0.4, **style)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_phases(above, below, life: Lifetimes) -> None:
    """Separate forward, backward and what follows by dotted lines."""
    starts = {"forward": 0}
    if life.backward:
        starts |= dict(zip(("backward", "after"), life.backward, strict=True))
    for name, start in starts.items():
        if start:
            for axes in (above, below):
                axes.axvline(start, color="black", linestyle=":", linewidth=1.0)
        above.text(start, 1.03, f" {name}", transform=above.get_xaxis_transform(), size=8)
