"""Figures of time in data parallelism: when buckets are in flight, and how much they hide. Pure functions."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter

from shared import formulas
from shared.plots import COLORS, HATCHES, LINES, MARKERS
from shared.timeline import COMMUNICATION, Timeline


def schedule(line: Timeline, ranks: int, alpha_s: float, beta_s: float) -> Figure:
    """Draw when each bucket of a recorded step was full, and when its all-reduce is predicted to be in flight.

    Bucket i completes at eᵢ = max(eᵢ₋₁, fullᵢ) + tᵢ, where tᵢ is the time of a ring all-reduce. Everything to the right
    of the end of backward is exposed.
    """
    spans = [span for span in line.spans if span.lane == COMMUNICATION]
    full_ms = [1e3 * (span.began_s - line.began_s) for span in spans]
    backward_end_ms = 1e3 * (max(ended_s for _, ended_s in line.lane("backward")) - line.began_s)
    lasts_ms = [1e3 * formulas.ring_all_reduce_s(span.payload_bytes, ranks, alpha_s, beta_s) for span in spans]
    begins_ms, end_ms = [], 0.0
    for full, lasts in zip(full_ms, lasts_ms, strict=True):
        begins_ms.append(max(end_ms, full))
        end_ms = begins_ms[-1] + lasts
    figure, axes = plt.subplots(figsize=(8.0, 1.2 + 0.3 * len(spans)), layout="constrained")
    rows = range(len(spans))
    if end_ms > backward_end_ms:
        label = f"predicted exposed time: {end_ms - backward_end_ms:.0f} ms"
        axes.axvspan(backward_end_ms, end_ms, color="0.88", label=label)
    axes.axvline(backward_end_ms, color="black", linestyle="--", linewidth=1.2, label="end of backward")
    waits_ms = [begin - full for begin, full in zip(begins_ms, full_ms, strict=True)]
    axes.barh(rows, waits_ms, left=full_ms, height=0.18, color="0.45", label="full, waiting for the bucket before it")
    wire = {"facecolor": COLORS[4], "edgecolor": "white", "hatch": HATCHES[1], "linewidth": 0.5}
    axes.barh(rows, lasts_ms, left=begins_ms, height=0.7, label="predicted time on the link", **wire)
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
    style: dict[str, Any] = {"color": "black", "linestyle": "none", "markersize": 6}
    for index, (name, of_tokens) in enumerate(marks.items()):
        filled: dict[str, Any] = {"fillstyle": "full" if index else "none", "marker": MARKERS[index]}
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


def exposed_by_cap(panels: dict[str, dict[float, tuple[float, float]]]) -> Figure:
    """Draw computed exposed times against the bucket cap, one panel per link. The gray area is what overlap saves.

    Args:
        panels: By link and by cap, the exposed time as a part of the computing time, if buckets are launched after
            backward and if they are launched during backward.
    """
    figure, axes = plt.subplots(1, len(panels), figsize=(9.0, 3.6), sharex=True, sharey=True, layout="constrained")
    for panel, (title, of_caps) in zip(axes, panels.items(), strict=True):
        caps, (after, during) = list(of_caps), zip(*of_caps.values(), strict=True)
        panel.plot(caps, after, color=COLORS[1], linestyle="--", label="launched after backward")
        panel.plot(caps, during, color=COLORS[0], label="launched during backward")
        panel.fill_between(caps, during, after, color="0.5", alpha=0.15)
        best_caps, best = zip(*((caps[line.index(min(line))], min(line)) for line in (after, during)), strict=True)
        circle = {"color": "black", "marker": MARKERS[0], "fillstyle": "none", "linestyle": "none", "clip_on": False}
        panel.plot(best_caps, best, label="best cap", **circle)
        saved = min(after) - min(during)
        panel.set(title=f"{title}\noverlap saves {saved:.1%}", xlabel="cap, MB", xscale="log", ylim=(0, None))
        panel.set_xticks([0.25, 1, 4, 25], ["0.25", "1", "4", "25"])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(PercentFormatter(1.0))
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("exposed / computing time")
    figure.suptitle("computed, not measured", fontsize="medium")
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, ncols=3, loc="outside lower center")
    plt.close(figure)
    return figure
