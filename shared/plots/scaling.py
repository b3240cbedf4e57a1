"""Figures of time in data parallelism: when buckets are in flight, and the efficiency of more ranks. Pure functions."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from shared.plots import COLORS, HATCHES, LINES, MARKERS


def schedule(
    ready_ms: list[float],
    lasts_ms: list[float],
    ends_ms: list[float],
    backward_end_ms: float,
    measured_ends_ms: list[float] | None = None,
) -> Figure:
    """Draw one row per bucket: when it is predicted to be full, in flight and complete. Marks are measured completions.

    ends_ms[i] is max(ends_ms[i − 1], ready_ms[i]) + lasts_ms[i]. Everything to the right of the end of backward is
    exposed.
    """
    figure, axes = plt.subplots(figsize=(8.0, 1.2 + 0.3 * len(ready_ms)), layout="constrained")
    rows = range(len(ready_ms))
    begins_ms = [end - lasts for end, lasts in zip(ends_ms, lasts_ms, strict=True)]
    waits_ms = [begin - ready for begin, ready in zip(begins_ms, ready_ms, strict=True)]
    if ends_ms[-1] > backward_end_ms:
        axes.axvspan(backward_end_ms, ends_ms[-1], color="0.88", label="predicted exposed time")
    axes.axvline(backward_end_ms, color="black", linestyle="--", linewidth=1.2, label="end of backward")
    axes.barh(rows, waits_ms, left=ready_ms, height=0.18, color="0.45", label="full, waiting for the bucket before it")
    wire = {"facecolor": COLORS[4], "edgecolor": "white", "hatch": HATCHES[1], "linewidth": 0.5}
    axes.barh(rows, lasts_ms, left=begins_ms, height=0.7, label="predicted time in flight", **wire)
    if measured_ends_ms is not None:
        axes.plot(measured_ends_ms, rows, "D", color="black", markersize=5, label="measured completion")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="ms since the start of the step", yticks=rows, xlim=(0, None))
    axes.set_yticklabels([f"bucket {row + 1}" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    plt.close(figure)
    return figure


def efficiency(
    curves: dict[str, dict[str, dict[int, float]]], marks: dict[str, dict[str, dict[int, float]]] | None = None
) -> Figure:
    """Draw efficiency against the number of ranks, with one panel per title and one line per name.

    Args:
        curves: The efficiency (0 to 1) for each number of ranks, by title and name.
        marks: The same, drawn as marks only.
    """
    size = (max(4.6, 3.1 * len(curves)), 3.4)  # a wider figure would be shrunk to fit the page, and so would its labels
    figure, panels = plt.subplots(1, len(curves), figsize=size, sharey=True, layout="constrained", squeeze=False)
    shown = {}
    for axes, (title, lines) in zip(panels.flat, curves.items(), strict=True):
        for index, (name, line) in enumerate(lines.items()):
            style = {"color": COLORS[index], "linestyle": LINES[index], "linewidth": 1.8}
            (shown[name],) = axes.plot(list(line), list(line.values()), **style)
        for index, (name, points) in enumerate((marks or {}).get(title, {}).items()):
            style = {"color": "black", "marker": MARKERS[index], "linestyle": "none", "markersize": 6}
            (shown[name],) = axes.plot(list(points), list(points.values()), fillstyle="none", **style)
        axes.set_xscale("log", base=2)
        sizes = sorted({size for line in lines.values() for size in line})
        axes.set(title=title, xlabel="ranks", xticks=[size for size in sizes if size in (1, 2, 4, 8, 64, 512)])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set(ylim=(0, 1.05))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].set_ylabel("efficiency")
    columns = min(len(shown), 3)
    figure.legend(shown.values(), shown.keys(), frameon=False, ncols=columns, loc="outside upper left")
    plt.close(figure)
    return figure
