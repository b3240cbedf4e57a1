"""Figures of mixtures of experts: what experts cost, how unevenly they are used, and what a capacity drops."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, PercentFormatter

from shared.plots import COLORS, HATCHES, LINES, MARKERS, finish, new_axes, rank_color


def parameters_and_computation(lines: dict[str, list[tuple[float, float, str]]]) -> Figure:
    """Draw layers by what they compute per token and by how many parameters they have.

    Args:
        lines: For each kind of layer, points of (operations per token, parameters, label), both relative to one MLP.
    """
    figure, axes = new_axes(6.4, 3.4)
    sizes = sorted({round(parameters) for points in lines.values() for _, parameters, _ in points})
    for index, (name, points) in enumerate(lines.items()):
        x, y, labels = zip(*points, strict=True)
        style: dict[str, Any] = {"color": COLORS[index], "linestyle": LINES[index], "marker": MARKERS[index]}
        axes.plot(x, y, label=name, **style)
        for at_x, at_y, label in zip(x, y, labels, strict=True):
            place = {"xytext": (-8, -3) if index else (6, -12), "ha": "right" if index else "left"}
            axes.annotate(label, (at_x, at_y), textcoords="offset points", **place)
    axes.set(xscale="log", yscale="log", xlabel="operations per token, × one MLP", ylabel="parameters, × one MLP")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(FixedLocator(sizes))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.margins(0.18)
    axes.legend(frameon=False)
    return finish(figure)


def busy_and_waiting(rows: Sequence[int], busy_ms: Sequence[float]) -> Figure:
    """Draw how long each rank's expert computes, and how long the rank then waits for the slowest one.

    Args:
        rows: How many rows each rank's expert gets.
        busy_ms: How long it computes.
    """
    figure, axes = new_axes(7.0, 2.6)
    layer_ms = max(busy_ms)
    for rank, (count, ms) in enumerate(zip(rows, busy_ms, strict=True)):
        axes.barh(rank, ms, color=rank_color(rank), edgecolor="black", linewidth=0.5)
        waits = {"facecolor": "white", "edgecolor": "0.4", "hatch": HATCHES[1], "linewidth": 0.5}
        axes.barh(rank, layer_ms - ms, left=ms, label="waits" if rank == 0 else None, **waits)
        axes.text(layer_ms * 1.01, rank, f"{count} rows", va="center")
    mean_ms = sum(busy_ms) / len(busy_ms)
    axes.axvline(mean_ms, color="black", linestyle="--", linewidth=1.2, label=f"balanced, {mean_ms:.0f} ms")
    axes.set(xlabel="ms (emulated: each row takes the same time)", xlim=(0, 1.12 * layer_ms))
    axes.set_yticks(range(len(rows)), [f"expert {rank}" for rank in range(len(rows))])
    axes.invert_yaxis()
    figure.legend(frameon=False, loc="outside upper right", ncols=2)
    return finish(figure)


def capacity(factors: Sequence[float], dropped: Sequence[float], empty: Sequence[float]) -> Figure:
    """Draw which share of the tokens is dropped, and which share of the slots stays empty, by capacity factor."""
    figure, axes = new_axes(6.4, 3.0)
    curves = {"tokens that are dropped": dropped, "slots that stay empty": empty}
    for index, (name, shares) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": COLORS[index], "linestyle": LINES[index], "marker": MARKERS[index]}
        axes.plot(factors, shares, label=name, **style)
    if 1.0 in factors:
        at_1 = dropped[factors.index(1.0)]
        axes.axvline(1.0, color="gray", linewidth=0.8, linestyle=":")
        axes.text(1.0, 0.95, f" c = 1: {at_1:.0%} of both", transform=axes.get_xaxis_transform(), va="top")
    axes.set(xlabel="capacity factor", ylim=(0, None))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(frameon=False)
    return finish(figure)
