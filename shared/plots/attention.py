"""Figures of a ring's steps: when each rank computes with whose keys, and how long a step takes."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots import COLORS, LINES, finish, new_axes, rank_color, rank_ink
from shared.plots.costs import first_below

Step = tuple[int, float, float]  # whose keys; when the computation began and ended, in seconds


def ring_steps(runs: dict[str, list[list[Step]]]) -> Figure:
    """Draw the ranks' computations in the steps of one or more rings, on one time axis.

    The number and the color of a bar are those of the rank whose keys it uses. Until the last rank of a ring has
    finished, time without computation is hatched.

    Args:
        runs: For each name, the steps of each rank.
    """
    lanes = sum(len(run) for run in runs.values())
    figure, axes = new_axes(8.6, 0.75 + 0.32 * lanes + 0.35 * len(runs))
    y, ticks = 0.0, []
    longest_ms = 1e3 * max(ended for run in runs.values() for steps in run for *_, ended in steps)
    figure.suptitle("A number is the rank whose keys are used. Hatched: idle until the last rank has finished", size=10)
    for name, run in runs.items():
        axes.text(0, y - 0.2, f" {name}", ha="left", va="bottom", weight="bold")
        end_ms = 1e3 * max(ended for steps in run for *_, ended in steps)
        axes.plot([end_ms, end_ms], [y - 0.1, y + len(run) - 0.1], color="gray", linewidth=1.2)
        axes.text(end_ms, y - 0.2, f"{end_ms:.0f} ms", ha="center", va="bottom")
        for rank, steps in enumerate(run):
            ticks.append((y + 0.4, f"rank {rank}"))
            axes.broken_barh([(0, end_ms)], (y, 0.8), facecolor="none", edgecolor="darkgray", hatch="////", linewidth=0)
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
    axes.set(xlabel="ms (sleeps that stand in for computation)", ylim=(y - 0.7, -1.0), xlim=(0, 1.03 * longest_ms))
    axes.set_yticks(*zip(*ticks, strict=True))
    return finish(figure)


@dataclass(frozen=True)
class StepTimes:
    """A ring step's computation and transfer in seconds, for several numbers of tokens per rank."""

    tokens: list[float]  # per rank
    computes_s: list[float]
    transfers_s: dict[str, list[float]]  # by the name of the link


def step_times(times: StepTimes, marks: dict[int, str]) -> Figure:
    """Draw the times of a ring step against the tokens per rank. A mark shows from where the transfer is hidden.

    Args:
        marks: For some numbers of tokens per rank, what to write there.
    """
    figure, axes = new_axes(7.2, 3.8)
    axes.plot(times.tokens, _ms(times.computes_s), color=COLORS[0], linewidth=2.4, label="attention: grows with n²")
    for tokens, sequence in marks.items():
        axes.axvline(tokens, color="gray", linewidth=0.8, linestyle=":")
        axes.text(tokens, 0.01, f" {sequence}", transform=axes.get_xaxis_transform(), color="gray", va="bottom")
    for index, (name, transfer_s) in enumerate(times.transfers_s.items(), 1):
        axes.plot(times.tokens, _ms(transfer_s), color=COLORS[index], linestyle=LINES[index], label=name)
        crossing = first_below(times.tokens, transfer_s, times.computes_s)
        if crossing is None:  # It is never hidden.
            continue
        level_ms = 1e3 * max(s for n, s in zip(times.tokens, transfer_s, strict=True) if n <= crossing)
        axes.plot(crossing, level_ms, "o", color=COLORS[index])
        align, offset = ("right", (-8, 8)) if index == 1 else ("left", (8, -14))  # where no other line passes
        label = f"hidden from n = {round(crossing, -2):,.0f}"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.annotate(label, (crossing, level_ms), xytext=offset, textcoords="offset points", ha=align, bbox=box)
    axes.set(xscale="log", yscale="log", xlabel="n, tokens of one sequence per rank", ylabel="ms per ring step")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)
    return finish(figure)


def _ms(times_s: list[float]) -> list[float]:
    return [1e3 * s for s in times_s]
