"""Figures of gradient compression: what the loss has cost in bytes and in seconds, and what compression saves."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from shared.plots import COLORS, LINES, MARKERS, finish, new_axes

MEAN_OF = 10  # steps per point, because the loss of a single step is noisy

Runs = dict[str, tuple[float, Sequence[float]]]  # for each name, the cost of a step, and the loss of each step


def loss_against_bytes(runs: Runs) -> Figure:
    """Draw the loss against the bytes that a rank has sent so far, on a logarithmic axis.

    Args:
        runs: The cost of a step is the bytes that a rank sends.
    """
    figure, axes = new_axes(6.4, 3.6)
    _draw_losses(axes, {name: (step_bytes / 1e6, losses) for name, (step_bytes, losses) in runs.items()})
    axes.set(xscale="log", xlabel="MB sent by a rank so far", title="The same steps, with fewer bytes")
    _plain_ticks(axes)
    return finish(figure)


def loss_against_seconds(runs: Runs, where: str) -> Figure:
    """Draw the loss against the time so far.

    Args:
        runs: The cost of a step is its time in seconds.
        where: Where it was measured, for the title.
    """
    figure, axes = new_axes(6.9, 3.6)
    timed = {f"{name}: {step_s * len(losses):.1f} s": (step_s, losses) for name, (step_s, losses) in runs.items()}
    _draw_losses(axes, timed)
    axes.set(xlim=(0, None), xlabel="seconds so far", title=f"The time of these steps: {where}")
    return finish(figure)


def _draw_losses(axes: Axes, runs: Runs) -> None:
    highest = 0.0
    for index, (name, (step_cost, losses)) in enumerate(runs.items()):
        means = [sum(losses[at : at + MEAN_OF]) / MEAN_OF for at in range(0, len(losses) - MEAN_OF + 1, MEAN_OF)]
        highest = max(highest, 1.1 * means[0])  # the loss of a run that diverges leaves the figure
        every = max(1, len(means) // 6)
        axes.plot(
            [(at + 1) * MEAN_OF * step_cost for at in range(len(means))],
            means,
            color=COLORS[index % len(COLORS)],
            linestyle=LINES[index % len(LINES)],
            marker=MARKERS[index % len(MARKERS)],
            markevery=((len(means) - 1) % every, every),  # also where the line ends
            label=name,
        )
    axes.set(ylim=(0, highest), ylabel=f"loss, mean of {MEAN_OF} steps")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plain_ticks(axes: Axes) -> None:
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())


def loss_against_saving(families: dict[str, dict[str, tuple[float, float]]]) -> Figure:
    """Draw the last loss of runs against how many times fewer bytes they have sent, one line per method.

    Args:
        families: For each method, its settings, and the factor and the loss of each of them.
    """
    figure, axes = new_axes(6.4, 3.6)
    for index, (method, settings) in enumerate(families.items()):
        factors, losses = zip(*settings.values(), strict=True)
        style: dict[str, Any] = {"color": COLORS[index], "linestyle": LINES[index], "marker": MARKERS[index]}
        axes.plot(factors, losses, label=method, **style)
        for name, point in settings.items():
            axes.annotate(
                name,
                point,
                xytext=(-4, 5),
                textcoords="offset points",
                ha="right",
                size=8,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
            )
    axes.set(xscale="log", ylim=(0, None), xlabel="times fewer bytes than float32", ylabel="last loss")
    _plain_ticks(axes)
    axes.margins(0.1)
    axes.set_ylim(0)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)
