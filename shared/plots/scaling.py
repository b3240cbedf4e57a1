"""Figures of time in data parallelism: when buckets are in flight, and how much they hide. Pure functions."""

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
    axes.barh(rows, lasts_ms, left=begins_ms, height=0.7, label="predicted time on the link", **wire)
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


def knee(lines: dict[str, dict[int, float]], marks: dict[str, dict[int, float]], needed: float) -> Figure:
    """Draw which part of a step a rank computes, against its tokens per step.

    Args:
        lines: Predictions, by name.
        marks: Measurements, by name.
        needed: The tokens with which backward takes as long as the all-reduce.
    """
    figure, axes = plt.subplots(figsize=(6.8, 3.6), layout="constrained")
    axes.axvline(needed, color="black", linestyle="--", linewidth=1.2)
    label = f"{needed:.0f} tokens: backward takes\nas long as the all-reduce"
    axes.annotate(label, (needed * 1.05, 0.06), ha="left", va="bottom")
    for index, (name, line) in enumerate(lines.items()):
        axes.plot(*zip(*line.items(), strict=True), color=COLORS[index], linestyle=LINES[index], label=name)
    style = {"color": "black", "linestyle": "none", "markersize": 6}
    for index, (name, of_tokens) in enumerate(marks.items()):
        filled = {"fillstyle": "full" if index else "none", "marker": MARKERS[index]}
        axes.plot(*zip(*of_tokens.items(), strict=True), label=name, **style, **filled)
    below = {"xytext": (0, -8), "textcoords": "offset points", "ha": "center", "va": "top"}
    for tokens, share in next(iter(marks.values())).items():
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the lines behind the text
        axes.annotate(f"{share:.0%}", (tokens, share), bbox=white, **below)
    axes.set_xscale("log", base=2)
    ticks = sorted({tokens for of_tokens in marks.values() for tokens in of_tokens})
    axes.set(xlabel="tokens per rank and step", xticks=ticks, ylim=(0, 1.05), ylabel="computing, part of a step")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=2, loc="outside upper left")
    plt.close(figure)
    return figure


def efficiencies(predicted: dict[str, dict[int, float]], measured: dict[str, dict[int, float]], title: str) -> Figure:
    """Draw the efficiency of weak scaling against the number of ranks: lines are predictions, marks are measured.

    Args:
        predicted: The efficiency by the number of ranks, by bucket cap.
        measured: The same for some of these caps.
    """
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for index, (name, curve) in enumerate(predicted.items()):
        axes.plot(list(curve), list(curve.values()), color=COLORS[index], linestyle=LINES[index], label=name)
        marks = measured.get(name, {})
        style = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": "none", "markersize": 7}
        axes.plot(list(marks), list(marks.values()), label=f"{name}, measured" if marks else "", **style)
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="ranks", xticks=list(next(iter(predicted.values()))), ylim=(0, 1.05), ylabel="efficiency", title=title
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right center")
    plt.close(figure)
    return figure


def exposed_by_cap(panels: dict[str, dict[str, dict[float, float]]]) -> Figure:
    """Draw computed exposed times against the bucket cap, one panel per link. The gray area is what overlap saves.

    Args:
        panels: The exposed time as a part of the computing time, by link, by when buckets are launched, and by cap.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(9.0, 3.6), sharex=True, sharey=True, layout="constrained")
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        for index, (name, curve) in enumerate(curves.items()):
            style = {"color": COLORS[1 - index], "linestyle": "-" if index else "--"}
            panel.plot(list(curve), list(curve.values()), label=name, **style)
        first, last = curves.values()
        panel.fill_between(list(first), list(last.values()), list(first.values()), color="0.5", alpha=0.15)
        saved = min(first.values()) - min(last.values())
        panel.set(title=f"{title}\nsaves {saved:.1%}", xlabel="cap, MB", xscale="log", ylim=(0, None))
        panel.set_xticks([0.25, 1, 4, 25], ["0.25", "1", "4", "25"])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("exposed / computing time")
    figure.suptitle("computed, not measured", fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=2, loc="outside lower center")
    plt.close(figure)
    return figure
