"""A figure of gradient synchronization: gradients before and after, the bucket map, and the cost of each method."""

from dataclasses import dataclass

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from shared.plots import COLORS
from shared.plots.buckets import draw_map, units


@dataclass
class Cost:
    """The cost of one method of averaging, for one rank."""

    messages: int
    sent_bytes: float
    took_ms: float = 0.0


def gradient_sync(
    before: list[dict[str, list[float]]],
    after: list[dict[str, list[float]]],
    sizes_bytes: dict[str, int],
    buckets: list[list[str]],
    costs: dict[str, Cost],
) -> Figure:
    """Draw the gradients on every rank before and after, the model's buckets, and the cost of each method of averaging.

    Args:
        before: For each rank, some elements of each parameter's gradient, by name. They are drawn relative to the
            parameter's largest element before synchronization, so that small gradients are visible beside large ones.
        after: The same after synchronization.
    """
    ranks, rows = len(before), len(units(sizes_bytes))
    heights_in = [1.0 + 0.36 * ranks, 0.9 + 0.26 * rows, 0.7 + 0.36 * len(costs)]
    figure = plt.figure(figsize=(10.0, sum(heights_in)), layout="constrained")
    top, middle, bottom = figure.subfigures(3, 1, squeeze=False, height_ratios=heights_in)[:, 0]
    _draw_gradients(top, before, after, sizes_bytes)
    axes = middle.subplots()
    draw_map(axes, sizes_bytes, buckets)
    axes.set_title("which gradients are reduced together: buckets, numbered in launch order")
    left, right = bottom.subplots(1, 2, sharey=True)
    _draw_bars(left, {name: cost.messages for name, cost in costs.items()}, "all-reduces", "%d")
    _draw_bars(right, {name: cost.took_ms for name, cost in costs.items()}, "ms per synchronization", "%.3g")
    plt.close(figure)
    return figure


def _draw_gradients(figure, before: list[dict], after: list[dict], sizes_bytes: dict[str, int]) -> None:
    scale_of = {
        name: max(abs(element) for rank_gradients in before for element in rank_gradients[name]) or 1.0
        for name in sizes_bytes
    }
    panels = figure.subplots(1, 2, sharey=True)
    for axes, gradients, title in zip(panels, (before, after), ("before", "after"), strict=True):
        rows = [
            [element / scale_of[name] for name in sizes_bytes for element in rank_gradients[name]]
            for rank_gradients in gradients
        ]
        image = axes.imshow(rows, cmap="cividis", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(title=f"gradients, {title}", yticks=range(len(rows)), xlabel="sampled elements, in the model's order")
        axes.set_yticklabels([f"rank {rank}" for rank in range(len(rows))])
        _mark_units(axes, before[0], sizes_bytes)
    figure.colorbar(image, ax=panels, label="relative to the largest element", ticks=(-1, 0, 1))


def _mark_units(axes, samples: dict[str, list[float]], sizes_bytes: dict[str, int]) -> None:
    """Draw a line where each unit of the model begins, and name the units that have room for it."""
    start, ticks = 0, {}
    columns = sum(map(len, samples.values()))
    for unit, names in units(sizes_bytes).items():
        width = sum(len(samples[name]) for name in names)
        if width > 0.018 * len(unit) * columns:
            ticks[start + width / 2 - 0.5] = unit
        if start:
            axes.axvline(start - 0.5, color="white", linewidth=1.2)
        start += width
    axes.set_xticks(list(ticks), list(ticks.values()), size=8)
    axes.tick_params(axis="x", length=0)


def _draw_bars(axes, values: dict[str, float], unit: str, fmt: str) -> None:
    drawn = axes.barh(list(values), list(values.values()), color=COLORS[0], edgecolor="black", linewidth=0.6)
    axes.bar_label(drawn, fmt=fmt, padding=4)
    axes.set(xlabel=unit, xlim=(0, 1.18 * max(values.values())), ylim=(len(values) - 0.5, -0.5))
    axes.spines[["top", "right"]].set_visible(False)
