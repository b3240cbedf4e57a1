"""Figures of sharding: which rank owns which shard, and how much memory each rank needs. Pure functions."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from shared.plots import COLORS, HATCHES, LINES, MARKERS, rank_color


def ownership(sizes: dict[str, int], owned: list[list[str]]) -> Figure:
    """Draw the elements of a model from first to last, and below them, which rank owns them in two ways of sharding.

    Args:
        sizes: The elements of each parameter, by name. The blocks of a model are drawn as one piece each.
        owned: For each rank, the names of the parameters that it owns if each parameter has one owner. The other way is
            one owner per element: equal shards of the flattened model.
    """
    total, ranks = sum(sizes.values()), range(len(owned))
    owner = {name: rank for rank in ranks for name in owned[rank]}
    pieces: dict[str, int] = {}
    for name, elements in sizes.items():
        label = ".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1])
        pieces[label] = pieces.get(label, 0) + elements
    ways = {
        "one owner per parameter": [(elements, owner[name]) for name, elements in sizes.items()],
        "one owner per element": [(-(-total // len(owned)), rank) for rank in ranks],
    }
    figure, axes = plt.subplots(figsize=(8.0, 2.0), layout="constrained")
    start = 0
    for label, elements in pieces.items():
        axes.barh(0, elements, left=start, height=0.7, facecolor="white", edgecolor="black", linewidth=0.8)
        if elements > 0.016 * len(label) * total:
            axes.text(start + elements / 2, 0, label, ha="center", va="center", size=9)
        start += elements
    for row, way in enumerate(ways.values(), 1):
        _draw_pieces(axes, row, way, total)
    axes.set(
        xlim=(0, total),
        ylim=(len(ways) + 0.45, -0.45),
        xlabel="elements of the flattened model; color and digit say which rank owns them",
    )
    axes.set_yticks(range(len(ways) + 1), ["the model", *ways])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    plt.close(figure)
    return figure


def _draw_pieces(axes, row: int, pieces: list[tuple[int, int]], total: int) -> None:
    """Draw runs of elements, each with its rank where there is room."""
    start = 0
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.9}
    for elements, rank in pieces:
        style = {
            "facecolor": rank_color(rank),
            "hatch": HATCHES[rank % len(HATCHES)],
            "edgecolor": "black",
            "linewidth": 0.4,
        }
        axes.barh(row, elements, left=start, height=0.7, **style)
        if elements > 0.03 * total:
            axes.text(start + elements / 2, row, f"{rank}", ha="center", va="center", size=9, bbox=box)
        start += elements


def bytes_per_parameter(
    formula: dict[str, dict[int, float]], measured: dict[str, dict[int, float]], limits: dict[str, float]
) -> Figure:
    """Draw the bytes a rank holds per parameter against the number of ranks: formulas, measurements and limits.

    Args:
        formula: The bytes for each number of ranks, by name.
        measured: The same for measurements.
        limits: The bytes that the formula approaches for many ranks, by name.
    """
    figure, axes = plt.subplots(figsize=(7.0, 3.4), layout="constrained")
    names = list(dict.fromkeys([*formula, *measured, *limits]))
    for index, name in enumerate(names):
        color, line, values = COLORS[index], LINES[index], formula.get(name, {})
        axes.plot(list(values), list(values.values()), color=color, linestyle=line, label=f"{name}, formula")
        if name in measured:
            marks = measured[name]
            label = f"{name}, measured"
            axes.plot(list(marks), list(marks.values()), MARKERS[index], color=color, label=label)
        if name in limits:
            axes.axhline(limits[name], color=color, linestyle=":", linewidth=1.0)
            text = {"ha": "left", "va": "center", "size": 9, "transform": axes.get_yaxis_transform()}
            axes.text(1.01, limits[name], f"N → ∞: {limits[name]:g}", **text)
    rank_counts = sorted({count for values in formula.values() for count in values})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(rank_counts))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{count}" for count in rank_counts])
    axes.set(xlabel="ranks", ylabel="bytes per parameter", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    plt.close(figure)
    return figure


def over_backward(held_bytes: dict[str, list[int]], levels_bytes: dict[str, float]) -> Figure:
    """Draw the bytes held during backward, one line per name, and dotted levels for comparison.

    Args:
        held_bytes: The bytes at every moment, by name. Lines may have different numbers of moments.
        levels_bytes: The bytes of each level, by name. The name is drawn at its right end.

    Raises:
        ValueError: If a line has no moments.
    """
    empty = [name for name, values in held_bytes.items() if not values]
    if empty or not held_bytes:
        raise ValueError(f"There is nothing to draw: {empty[0] if empty else 'held_bytes'} is empty.")
    figure, axes = plt.subplots(figsize=(7.0, 3.4), layout="constrained")
    for index, (name, values) in enumerate(held_bytes.items()):
        percent = [100 * moment / max(1, len(values) - 1) for moment in range(len(values))]
        style = {"color": COLORS[index], "linestyle": LINES[index], "linewidth": 1.8}
        style |= {"marker": MARKERS[index], "markevery": [values.index(max(values))]}  # at the highest point
        axes.step(percent, [nbytes / 1e6 for nbytes in values], where="post", label=name, **style)
    for name, level in levels_bytes.items():
        axes.axhline(level / 1e6, color="black", linestyle=":", linewidth=1.0)
        text = {"ha": "left", "va": "center", "size": 9, "transform": axes.get_yaxis_transform()}
        axes.text(1.03, level / 1e6, name, **text)
    axes.set(xlabel="operators in backward() and finish_gradient_sync(), %", xlim=(0, 100), ylim=(0, None))
    axes.set_ylabel("gradients and buckets, MB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside upper left", ncols=len(held_bytes))
    plt.close(figure)
    return figure
