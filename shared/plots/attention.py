"""A figure of a ring's steps: when each rank computes with whose keys, and when it waits."""

from matplotlib.figure import Figure

from shared.plots import finish, new_axes, rank_color, rank_ink

Step = tuple[int, float, float]  # whose keys; when the computation began and ended, in seconds


def ring_steps(runs: dict[str, list[list[Step]]]) -> Figure:
    """Draw the ranks' computations in the steps of one or more rings, on one time axis.

    The number and the color of a bar are those of the rank whose keys it uses. Gaps are idle time. Steps without work
    are not drawn.

    Args:
        runs: For each name, the steps of each rank.
    """
    lanes = sum(len(run) for run in runs.values())
    figure, axes = new_axes(8.6, 0.75 + 0.32 * lanes + 0.35 * len(runs))
    y, ticks = 0.0, []
    longest_ms = 1e3 * max(ended for run in runs.values() for steps in run for *_, ended in steps)
    figure.suptitle("A number is the rank whose keys are used. White: idle", size=10)
    for name, run in runs.items():
        axes.text(0, y - 0.2, name, ha="left", va="bottom", weight="bold")
        for rank, steps in enumerate(run):
            ticks.append((y + 0.4, f"rank {rank}"))
            for source, began_s, ended_s in steps:
                began_ms, length_ms = 1e3 * began_s, 1e3 * (ended_s - began_s)
                if length_ms < longest_ms / 50:
                    continue
                style = {"facecolor": rank_color(source), "edgecolor": "black", "linewidth": 0.6}
                axes.broken_barh([(began_ms, length_ms)], (y, 0.8), **style)
                middle = began_ms + length_ms / 2
                axes.text(middle, y + 0.4, f"{source}", ha="center", va="center", color=rank_ink(source))
            y += 1
        y += 0.9
    axes.set(xlabel="ms (sleeps that stand in for computation)", ylim=(y - 0.7, -1.0), xlim=(0, longest_ms))
    axes.set_yticks(*zip(*ticks, strict=True))
    return finish(figure)
