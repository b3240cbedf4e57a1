"""Figures of gradient compression: what the loss has cost in bytes."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from shared.plots import COLORS, LINES, MARKERS, finish, new_axes

MEAN_OF = 10  # steps per point, because the loss of a single step is noisy


def loss_against_bytes(runs: dict[str, tuple[float, Sequence[float]]]) -> Figure:
    """Draw the loss against the bytes that a rank has sent so far, on a logarithmic axis.

    Args:
        runs: For each name, the bytes that a rank sends per step, and the loss of each step.
    """
    figure, axes = new_axes(6.4, 3.6)
    highest = 0.0
    for index, (name, (step_bytes, losses)) in enumerate(runs.items()):
        means = [sum(losses[at : at + MEAN_OF]) / MEAN_OF for at in range(0, len(losses) - MEAN_OF + 1, MEAN_OF)]
        highest = max(highest, 1.1 * means[0])  # the loss of a run that diverges leaves the figure
        sent_mb = [(at + 1) * MEAN_OF * step_bytes / 1e6 for at in range(len(means))]
        axes.plot(
            sent_mb,
            means,
            color=COLORS[index % len(COLORS)],
            linestyle=LINES[index % len(LINES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=max(1, len(means) // 6),
            label=name,
        )
    axes.set(
        xscale="log", ylim=(0, highest), xlabel="MB sent by a rank so far", ylabel=f"loss, mean of {MEAN_OF} steps"
    )
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)
