"""The figure of the GPU benchmark: a pure function from the rows of its report."""

from shared.plots import COLORS, HATCHES

ROW_IN = 0.42  # the height of a row


def draw(times, sizes, rows: list[dict]) -> None:
    """Draw time relative to plain training, and memory beside the formula, one row per strategy and number of ranks.

    Args:
        times: The axes for the times.
        sizes: The axes for the memory, which share their vertical axis with the times.
        rows: A `benchmarks.gpu.Row` each, as a dict.
    """
    positions = range(len(rows))
    edge = {"edgecolor": "black", "linewidth": 0.6}
    drawn = times.barh(positions, [row["over_plain"] for row in rows], facecolor=COLORS[5], **edge)
    times.bar_label(drawn, [f"{row['over_plain']:.2f}" for row in rows], padding=3, size=8)
    times.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    times.set_yticks(positions, [f"{row['strategy']}, {_ranks(row['ranks'])}" for row in rows])
    style = {"height": 0.36, **edge}
    held = [row["held_gb"] for row in rows]
    sizes.barh([y - 0.2 for y in positions], held, facecolor=COLORS[1], label="held", **style)
    formula = {"facecolor": COLORS[2], "hatch": HATCHES[1], "label": "formula"}
    sizes.barh([y + 0.2 for y in positions], [row["formula_gb"] for row in rows], **formula, **style)
    peaks = [row["peak_gb"] for row in rows]
    sizes.plot(peaks, positions, "k|", markersize=12, label="allocator's peak")
    times.set(xlabel="× plain training", title="time per step")
    sizes.set(xlabel="GB", title="memory before the step")
    for axes in (times, sizes):
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    times.set_ylim(len(rows) - 0.4, -0.6)


def _ranks(count: int) -> str:
    return f"{count} rank" + ("s" if count != 1 else "")
