"""Figures of a ring collective, drawn from the log of its run. Pure functions."""

import matplotlib.pyplot as plt
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from shared.plots import COLORS

_ACROSS = 1.4  # distance between the columns of two ranks; a cell is 1 wide


def ring_step(logs: list, step: int) -> Figure:
    """Draw what every rank of a ring holds after one step, and what was sent in that step.

    Each column is a rank and each row a chunk. A cell names the ranks whose contributions its sum contains; the more it
    contains, the darker the cell is. White text on a dark cell means that the sum is complete. A chunk received in
    this step has a thick frame and an arrow from its sender.

    Args:
        logs: One log per rank, with one entry for the start and one per step. An entry is {"sent": name of the chunk
            that this rank sent (None at the start), "holds": {name of a chunk: digits}}. Digit r says how many times
            the sum contains rank r's contribution.

    Shape: logs [ranks][1 + steps].

    Raises:
        ValueError: If a rank's log is missing, or shorter than another one.
    """
    _check_ring(logs)
    figure, axes = plt.subplots(figsize=(5.0, 3.4), layout="constrained")
    _draw_ring(axes, logs, step, text_size=12)
    plt.close(figure)
    return figure


def ring_steps(logs: list) -> Figure:
    """Draw all steps of a ring side by side, each like `ring_step`, for readers without a kernel.

    Up to five steps are in one row. More of them, on four ranks, are in two.
    """
    _check_ring(logs)
    steps = len(logs[0])
    across = steps if steps <= 5 else 4
    down = -(-steps // across)
    size_in = (min(2.5 * across, 10.0), 2.1 * down)
    figure, panels = plt.subplots(down, across, figsize=size_in, layout="constrained", squeeze=False)
    for step, axes in enumerate(panels.flat):
        if step < steps:
            _draw_ring(axes, logs, step, text_size=9, in_a_row=True)
        else:
            axes.axis("off")
    if steps < panels.size:
        _draw_ring_key(panels.flat[-1], len(logs))
    plt.close(figure)
    return figure


def _check_ring(logs: list) -> None:
    lengths = [len(log) for log in logs]
    if not lengths or len(set(lengths)) > 1 or lengths[0] == 0:
        raise ValueError(f"A ring needs one log per rank, all of the same length, but their lengths are {lengths}.")


def _draw_ring(axes, logs: list, step: int, text_size: float, in_a_row: bool = False) -> None:
    ranks, names = len(logs), list(logs[0][0]["holds"])
    for rank in range(ranks):
        for row, name in enumerate(names):
            received = step > 0 and logs[rank - 1][step]["sent"] == name
            _draw_cell(axes, rank * _ACROSS, row, logs[rank][step]["holds"][name], received, text_size)
            if received:
                _draw_arrival(axes, rank, row, ranks)
    axes.set(xlim=(-0.95, (ranks - 1) * _ACROSS + 0.95), ylim=(len(names) - 0.4, -0.6))
    labels = [f"{rank}" if in_a_row else f"rank {rank}" for rank in range(ranks)]
    axes.set_xticks([rank * _ACROSS for rank in range(ranks)], labels)
    axes.set_yticks(range(len(names)), names if in_a_row else [f"chunk {name}" for name in names])
    if in_a_row:
        axes.set_xlabel("rank", size=text_size)
        if step == 0:
            axes.set_ylabel("chunk", size=text_size)
    axes.tick_params(length=0, labelsize=text_size)
    axes.spines[:].set_visible(False)
    title = _title(logs, step)
    axes.set_title(title.removesuffix(" the received chunk") if in_a_row else title, size=text_size + 1)


def _draw_cell(axes, x: float, y: float, digits: str, received: bool, text_size: float) -> None:
    contributions = "".join(str(rank) * int(count) for rank, count in enumerate(digits))
    fraction = sum(digit != "0" for digit in digits) / len(digits)
    edge = {"edgecolor": COLORS[1] if received else "black", "linewidth": 2.6 if received else 0.7}
    axes.add_patch(Rectangle((x - 0.5, y - 0.42), 1, 0.84, facecolor=_shade(fraction), **edge))
    ink = {"color": "white", "weight": "bold"} if fraction == 1 else {"color": "black"}
    axes.text(x, y, contributions, ha="center", va="center", size=text_size, **ink)


def _draw_ring_key(axes, ranks: int) -> None:
    """Explain in an empty panel how to read the other panels."""
    axes.set(xlim=(-0.7, 4.2), ylim=(4.0, -0.6))
    some, every_rank = "011".ljust(ranks, "0"), "1" * ranks
    rows = [
        (some, False, "sum of the chunks\nof ranks 1 and 2"),
        (some, True, "received in this step"),
        (every_rank, False, "complete sum"),
    ]
    for row, (digits, received, label) in enumerate(rows):
        _draw_cell(axes, 0, row, digits, received, text_size=8.5)
        axes.text(0.75, row, label, va="center", size=8.5)
    axes.plot([-0.5, 0.5], [3, 3], color=COLORS[1], linewidth=1.8, linestyle=":")
    axes.text(0.75, 3, "continues at rank 0", va="center", size=8.5)


def _shade(fraction: float) -> tuple:
    """Mix white and blue so that only a complete sum gets the darkest color."""
    strength = 1.0 if fraction == 1 else 0.55 * fraction
    blue = to_rgb(COLORS[0])
    return tuple(1 - strength * (1 - channel) for channel in blue)


def _draw_arrival(axes, rank: int, row: int, ranks: int) -> None:
    style = {"arrowstyle": "-|>", "color": COLORS[1], "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    left_edge = rank * _ACROSS - 0.5
    axes.annotate("", (left_edge, row), (left_edge - _ACROSS + 1, row), arrowprops=style)
    if rank == 0:  # the arrow comes from the last rank, so it leaves the figure on the right
        right_edge = (ranks - 1) * _ACROSS + 0.5
        axes.plot([right_edge, right_edge + 0.4], [row, row], color=COLORS[1], linewidth=1.8, linestyle=":")


def _title(logs: list, step: int) -> str:
    if step == 0:
        return "start"
    sent = logs[-1][step]["sent"]
    copied = logs[0][step]["holds"][sent] == logs[-1][step - 1]["holds"][sent]
    return f"step {step}: {'copy' if copied else 'add'} the received chunk"
