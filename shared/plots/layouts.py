"""Figures of layouts: what one needs in memory and time, and how far predicted times are from published ones."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from shared.plots import COLORS, HATCHES, finish, new_axes
from shared.plots.memory_plan import COMPONENT_STYLES

_PARTS = {
    "computing": (COLORS[0], HATCHES[0]),
    "tensor parallelism's all-reduces": (COLORS[4], HATCHES[1]),
    "messages between stages": (COLORS[3], HATCHES[2]),
    "the bubble": ("white", HATCHES[4]),
    "exposed communication of data parallelism": (COLORS[1], HATCHES[3]),
}
_RUN_IN, _BETWEEN_RUNS = 0.06, 2.4  # the height of a run's row, and the rows between two groups


def errors(by_group: dict[str, list[float]]) -> Figure:
    """Draw predicted over published time minus 1: a dot per run, below each other, grouped by source.

    Args:
        by_group: The errors of each group of runs. The runs of the first group are those to which the planner was
            fitted.
    """
    rows = sum(len(runs) + _BETWEEN_RUNS for runs in by_group.values())
    figure, axes = new_axes(8.0, 0.8 + _RUN_IN * rows)
    axes.axvspan(-0.1, 0.1, color="0.92", zorder=0)
    axes.axvline(0, color="black", linewidth=1.0, zorder=1)
    y, ticks = 0.0, []
    for index, (group, runs) in enumerate(by_group.items()):
        ys = [y + row for row in range(len(runs))]
        axes.hlines(ys, 0, runs, color="0.6", linewidth=1.0, zorder=1)
        marker: dict[str, Any] = {"marker": "s", "markerfacecolor": "white"} if index == 0 else {"marker": "o"}
        axes.plot(runs, ys, linestyle="none", color=COLORS[0], markersize=4, **marker)
        ticks.append((sum(ys) / len(ys), f"{group} ({len(runs)})"))
        y += len(runs) + _BETWEEN_RUNS
    axes.set(ylim=(y - _BETWEEN_RUNS, -1), yticks=[each for each, _ in ticks])
    axes.set_yticklabels([name for _, name in ticks])
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="← too fast · error of the predicted time (gray: within 10%) · too slow →")
    axes.set_title(f"The planner's errors for {sum(map(len, by_group.values()))} published runs (squares: fitted)")
    return finish(figure)


def needs(
    named: dict[str, tuple[dict[str, float], dict[str, float], str]], gpu_gb: float, usable_gb: float, title: str = ""
) -> Figure:
    """Draw what layouts need: the memory of a GPU by component on the left, the time of a step by part on the right.

    Args:
        named: For each layout the bytes by component (`planner.Plan`), the seconds by part (`layouts.StepTime`), and
            what to write beside its time.
    """
    figure, (memory, time) = plt.subplots(1, 2, figsize=(9.0, 1.9 + 0.55 * len(named)), layout="constrained")
    for y, (plan, parts, words) in enumerate(named.values()):
        held_gb = {name: nbytes / 1e9 for name, nbytes in plan.items()}
        _stack(memory, y, held_gb, COMPONENT_STYLES, f" {sum(held_gb.values()):,.0f} GB", least=gpu_gb)
        _stack(time, y, parts, _PARTS, f" {sum(parts.values()):.3g} s\n {words}")
    most_gb = max(sum(plan.values()) / 1e9 for plan, _, _ in named.values())
    memory.axvline(gpu_gb, color="black", linestyle="--", linewidth=1.3)
    memory.axvline(usable_gb, color="black", linestyle=":", linewidth=1.3)
    memory.set(
        xlabel=f"GB per GPU (lines: {usable_gb:g} GB usable of {gpu_gb:g})", xlim=(0, 1.25 * max(most_gb, gpu_gb))
    )
    time.set(xlabel="s per step", xlim=(0, 1.35 * max(sum(parts.values()) for _, parts, _ in named.values())))
    for axes in (memory, time):
        axes.set(yticks=range(len(named)), ylim=(len(named) - 0.5, -0.5))
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    memory.set_yticklabels(list(named))
    time.set_yticklabels([])
    handles = {}
    for axes in (memory, time):
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), frameon=False, ncols=3, loc="outside lower center", fontsize=9)
    if title:
        figure.suptitle(title, size=11)
    return finish(figure)


def _stack(axes, y: float, values: dict[str, float], styles: dict[str, tuple], words: str, least: float = 0.0) -> None:
    """Draw a bar of several parts, and write words on its right, at `least` or beyond."""
    left = 0.0
    for name, value in values.items():
        if value > 0.002 * sum(values.values()):
            color, hatch = styles[name]
            style = {"facecolor": color, "hatch": hatch, "edgecolor": "black", "linewidth": 0.6}
            axes.barh(y, value, left=left, height=0.6, label=name, **style)
        left += value
    axes.text(
        max(left, least), y, words, va="center", size=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4}
    )


def impossible(title: str, sentence: str) -> Figure:
    """Draw no layout, but the sentence that says why there is none."""
    figure, axes = new_axes(9.0, 1.2)
    axes.axis("off")
    axes.text(0.0, 0.5, f"{title}: {sentence}.", va="center", wrap=True)
    return finish(figure)
