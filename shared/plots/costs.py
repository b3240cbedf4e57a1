"""Figures of the α–β model: predictions beside measurements, and which algorithm is faster at which size."""

import textwrap
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from shared.plots import COLORS, LINES, MARKERS, finish, logarithmic, new_axes


def predicted_against_measured(
    predicted_s: dict[str, Callable[[float], float]],
    measured_s: dict[str, dict[float, float]],
    xlabel: str,
    lines_are: str = "predicted",
    mark: tuple[float, str] | None = None,
) -> Figure:
    """Draw predictions as lines, and measurements with the same names as marks in the same colors, on log axes.

    Args:
        predicted_s: Functions from bytes to seconds, by name.
        measured_s: The seconds for each number of bytes, by name.
        lines_are: What the legend calls the lines: "fitted" if these measurements determined them.
        mark: A number of bytes to mark with a dotted line, and the words beside it.
    """
    figure, axes = new_axes(6.0, 3.6)
    sizes = sorted(size for measured in measured_s.values() for size in measured)
    for index, name in enumerate(dict.fromkeys([*predicted_s, *measured_s])):
        color = COLORS[index]
        if name in predicted_s:
            dense = _between(sizes[0], sizes[-1])
            times_ms = [1e3 * predicted_s[name](size) for size in dense]
            axes.plot(dense, times_ms, color=color, linestyle=LINES[index], label=f"{name}, {lines_are}")
        if name in measured_s:
            times_ms = [1e3 * time_s for time_s in measured_s[name].values()]
            axes.plot(list(measured_s[name]), times_ms, MARKERS[index], color=color, label=f"{name}, measured")
    if mark is not None:
        size_bytes, words = mark
        axes.axvline(size_bytes, color="gray", linestyle=":", linewidth=1)
        axes.text(size_bytes, 0.02, f"{words} ", transform=axes.get_xaxis_transform(), ha="right", va="bottom")
    axes.set(xlabel=xlabel, ylabel="time, ms")
    logarithmic(axes)
    axes.legend(frameon=False)
    return finish(figure)


def side_by_side(measured_s: dict[str, dict[str, dict[int, float]]], xlabel: str) -> Figure:
    """Draw the same collectives measured in several places, one panel per place, on common logarithmic axes.

    Args:
        measured_s: The seconds for each number of bytes, by place and name.
    """
    columns = len(measured_s)
    figure, panels = plt.subplots(
        1, columns, figsize=(4.4 * columns, 3.4), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for axes, (place, of_name) in zip(panels.flat, measured_s.items(), strict=True):
        for index, (name, times_s) in enumerate(of_name.items()):
            style = {"color": COLORS[index], "linestyle": LINES[index], "marker": MARKERS[index], "linewidth": 1.8}
            axes.plot(list(times_s), [1e3 * time_s for time_s in times_s.values()], label=name, **style)
        axes.set(title=textwrap.fill(place, 44), xlabel=xlabel)
        logarithmic(axes)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("time, ms")
    panels[0, 0].legend(frameon=False)
    return finish(figure)


def all_reduce_costs(
    algorithms: dict[str, Callable[[float, int], float]],
    world_sizes: list[int],
    sizes_bytes: tuple[float, float] = (1e2, 1e10),
) -> Figure:
    """Draw predicted times against size, with one panel per world size.

    A vertical line marks the size from which the first algorithm is faster than the second.

    Args:
        algorithms: Functions from bytes and ranks to seconds, by name.
    """
    count = len(world_sizes)
    figure, panels = plt.subplots(
        1, count, figsize=(2.9 * count, 3.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, world_size in zip(panels.flat, world_sizes, strict=True):
        sizes = _between(*sizes_bytes)
        curves = [[1e3 * time_of(size, world_size) for size in sizes] for time_of in algorithms.values()]
        for index, (name, curve) in enumerate(zip(algorithms, curves, strict=True)):
            axes.loglog(sizes, curve, color=COLORS[index], linestyle=LINES[index], label=name)
        crossing = first_below(sizes, curves[0], curves[1])
        if crossing is not None:
            first, second = list(algorithms)[:2]
            words = f"right of this line, {first} beats {second}"
            axes.axvline(crossing, color="gray", linestyle=":", linewidth=1, label=words)
            label = f" {crossing / 1e6:.2g} MB" if crossing >= 1e5 else f" {crossing / 1e3:.2g} KB"
            axes.text(crossing, 0.98, label, transform=axes.get_xaxis_transform(), va="top")
        axes.set(title=f"{world_size} ranks", xlabel="tensor size, bytes")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("predicted time, ms")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), frameon=False, ncols=4, loc="outside upper left")
    return finish(figure)


def first_below(sizes: list[float], curve: list[float], other: list[float]) -> float | None:
    """Return the size from which a curve that begins above another lies below it, or None if they never cross."""
    excess = [mine - theirs for mine, theirs in zip(curve, other, strict=True)]
    below = next((index for index, each in enumerate(excess) if each < 0), 0)
    if not below:
        return None
    before, after = excess[below - 1 : below + 1]
    smaller, larger = sizes[below - 1 : below + 1]
    return smaller * (larger / smaller) ** (before / (before - after))


def _between(smallest: float, largest: float, points: int = 400) -> list[float]:
    """Return sizes at equal distances on a logarithmic axis."""
    ratio = largest / smallest
    return [smallest * ratio ** (index / (points - 1)) for index in range(points)]


def roofline(lines: dict[str, tuple[Callable[[float], float], float]], tokens: tuple[int, int], title: str) -> Figure:
    """Draw the predicted throughput against the tokens per GPU. A mark shows where the memory of a GPU ends.

    Args:
        lines: By strategy: tokens per second and GPU as a function of the tokens per GPU, and how many tokens fit at
            most. Beyond, and everywhere if none fit, the line is dotted.
        tokens: The smallest and the largest number of tokens per GPU, powers of two.
    """
    figure, axes = new_axes(7.0, 3.8)
    for index, (name, (throughput, most)) in enumerate(lines.items()):
        color = COLORS[index]
        sizes = [*_between(*tokens), most] if tokens[0] < most < tokens[1] else _between(*tokens)
        width = 3.2 - 0.6 * index  # so that a line shows under another one
        for part, style in (([x for x in sizes if x <= most], "-"), ([x for x in sizes if x >= most], ":")):
            axes.plot(sorted(part), list(map(throughput, sorted(part))), color=color, linestyle=style, linewidth=width)
        end: dict[str, Any] = {"marker": MARKERS[index], "markersize": 13 - 2.5 * index, "markeredgecolor": "white"}
        end = end if most else {"linestyle": ":"}
        label = f"{name}, up to {most:,} tokens" if most else f"{name}, does not fit"
        axes.plot([most] if most else [], [throughput(most)] if most else [], color=color, label=label, **end)
    roof = max(throughput(tokens[1]) for throughput, _ in lines.values())
    axes.axhline(roof, color="0.6", linewidth=0.8, zorder=0)
    axes.annotate(f"roof: {roof:,.0f}", (tokens[0], roof), (0, -4), textcoords="offset points", va="top")
    axes.set(xlabel="tokens per GPU and step", ylabel="tokens per second and GPU", title=title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    ticks = [tokens[0] * 2**power for power in range((tokens[1] // tokens[0]).bit_length())]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="lower right")
    return finish(figure)


def saving_intervals(saves_s: tuple[float, ...], failure_s: float) -> Figure:
    """Draw the share of a run's time that checkpoints and failures cost, against the time between two saves.

    Args:
        saves_s: For how long a save stops training, one line for each.
        failure_s: The mean time between failures.
    """
    figure, axes = new_axes(7.0, 3.4)
    minutes = _between(1, 120)
    for index, save_s in enumerate(saves_s):
        lost = [save_s / (60 * each) + 60 * each / (2 * failure_s) for each in minutes]
        label = f"a save stops training for {save_s:g} s"
        axes.plot(minutes, lost, color=COLORS[index], linestyle=LINES[index], label=label)
        best_s = (2 * save_s * failure_s) ** 0.5
        best = best_s / 60, save_s / best_s + best_s / (2 * failure_s)
        axes.plot(*best, MARKERS[index], color=COLORS[index])
        words = f"{best[0]:.1f} minutes: {best[1]:.1%}"
        axes.annotate(words, best, (0, 14), textcoords="offset points", ha="center", va="bottom")
    ticks = (1, 2, 5, 10, 20, 60, 120)
    axes.set(xlabel="minutes between two saves", ylabel="time lost", xscale="log", xlim=(1, 120), ylim=(0, 0.4))
    axes.set_title("Time lost to saves and failures; marks: the best interval", fontsize=10)
    axes.set_xticks(ticks, list(map(str, ticks)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(frameon=False, loc="upper center")
    return finish(figure)
