"""Train one model at ZeRO's stages 0 to 3, and draw what a rank holds, what it sends, and what a step takes.

    python -m benchmarks.stages                                     # a table
    python -m benchmarks.stages --figure source/images/stages.png   # the README's figure

Bytes stand beside the formulas of `shared/formulas.py`. Times are each round's ratio to stage 0; the stages take turns.
"""

import argparse
import contextlib
import io
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.rungs import ADAMW, MODELS
from shared import memory, ranks, wire
from shared.formulas import FP32_ADAM, model_state_bytes, step_sent_bytes
from shared.ranks import rankside
from solutions.strategies import STRATEGIES

WORLD_SIZE, ROUNDS, WARM_UP_ROUNDS = 4, 30, 3
OURS = [STRATEGIES[name] for name in ("overlapped_ddp", "zero1", "zero2", "zero3")]
STAGES = [f"stage {strategy.stage}: {strategy.title}" for strategy in OURS]
STATE = ("parameters", "gradients", "optimizer")
MB = 1e6


@dataclass(frozen=True)
class Found:
    """What a rank found out about one stage, or what the formulas say."""

    held_mb: dict[str, float]  # between backward and step; "gathered" is what comes on top at the parameters' peak
    sent_mb: float
    ratios: list[float]  # a step's time over stage 0's, round by round


# -- on a rank


def backward_of(model, optimizer, inputs) -> Callable[[], None]:
    finish = getattr(model, "finish_gradient_sync", getattr(optimizer, "reduce_gradients", None))

    def backward() -> None:
        optimizer.zero_grad()
        model(*inputs).backward()
        finish()

    return backward


def on_a_rank(rounds: int, warm_up_rounds: int = WARM_UP_ROUNDS) -> list[Found]:
    """Measure every stage; runs on every rank."""
    device, trained = torch.device(rankside.here.device), []
    for strategy in OURS:
        module, inputs = MODELS["TinyGPT"]()
        model, optimizer = strategy.build(module.to(device), ADAMW)
        trained.append((model, optimizer, backward_of(model, optimizer, [each.to(device) for each in inputs])))
    took_s = [[] for _ in trained]
    for number in range(rounds + warm_up_rounds):
        for stage in random.Random(number).sample(range(len(trained)), len(trained)):
            _, optimizer, backward = trained[stage]
            dist.barrier()
            began_s = time.perf_counter()
            backward()
            optimizer.step()
            dist.barrier()  # a step lasts until its slowest rank is done
            took_s[stage].append(time.perf_counter() - began_s)
    ratios = [[mine / plain for mine, plain in zip(times, took_s[0], strict=True)] for times in took_s]
    return [_bytes_of(*each, of_stage[warm_up_rounds:]) for each, of_stage in zip(trained, ratios, strict=True)]


def _bytes_of(model, optimizer, backward, ratios: list[float]) -> Found:
    with wire.ledger() as log:
        backward()
        optimizer.step()
    with memory.peak(model, optimizer) as peak:
        backward()
        held = memory.held(model, optimizer)
        optimizer.step()
    held_mb = {name: held.by_component()[name] / MB for name in STATE}
    most_mb = max(sample.held.parameters_bytes for sample in peak.samples) / MB
    return Found(held_mb | {"gathered": most_mb - held_mb["parameters"]}, log.sent_bytes / MB, ratios)


# -- what the formulas say


def predicted(stage: int, world_size: int = WORLD_SIZE) -> Found:
    with torch.device("meta"):
        module, _ = MODELS["TinyGPT"]()
    counts = {each: sum(p.numel() for p in each.parameters()) for each in (module, *module.blocks)}
    whole, *blocks = counts.values()
    held_mb = {}
    for name in STATE:
        alone = {"parameter": 0, "gradient": 0, "optimizer": 0} | {name.removesuffix("s"): 1}
        each = type(FP32_ADAM)(**{what: alone[what] * getattr(FP32_ADAM, what) for what in alone})
        held_mb[name] = model_state_bytes(whole, world_size, stage, each) / MB
    root = whole - sum(blocks)
    gathered = root + 2 * max(blocks) if stage == 3 else 0  # the one that computes, and the next
    # The root is gathered once: it stays from forward to backward.
    saved = root / whole * step_sent_bytes(whole, world_size, 2, 4) / 2 if stage == 3 else 0
    held_mb["gathered"] = FP32_ADAM.parameter * gathered / MB
    return Found(held_mb, (step_sent_bytes(whole, world_size, stage, FP32_ADAM.parameter) - saved) / MB, [])


# -- what came of it


def as_table(found: list[Found], formulas: list[Found]) -> str:
    lines = [["", "held MB", "formula", "gathered MB", "formula", "sent MB", "formula", "time"]]
    for name, mine, told in zip(STAGES, found, formulas, strict=True):
        pairs = [(sum(each.held_mb[part] for part in STATE) for each in (mine, told))]
        pairs += [(each.held_mb["gathered"] for each in (mine, told)), (mine.sent_mb, told.sent_mb)]
        numbers = [f"{number:.1f}" for pair in pairs for number in pair]
        lines.append([name, *numbers, f"{statistics.median(mine.ratios):.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def figure(found: list[Found], formulas: list[Found]):
    """Draw memory, bytes sent and time side by side, a row per stage; under each bar of bytes, the formula's."""
    import matplotlib.pyplot as plt

    size = {"figsize": (11.0, 3.2), "width_ratios": (3, 1.3, 1.3)}
    drawing, panels = plt.subplots(1, 3, sharey=True, layout="constrained", **size)
    memory_axes, wire_axes, time_axes = panels
    for row, (mine, told) in enumerate(zip(found, formulas, strict=True)):
        _draw_bytes(memory_axes, row, mine.held_mb, told.held_mb)
        _draw_bytes(wire_axes, row, {"sent": mine.sent_mb}, {"sent": told.sent_mb})
        _draw_time(time_axes, row, mine.ratios)
    memory_axes.set(yticks=range(len(found)), yticklabels=STAGES, xlabel="MB")
    memory_axes.set_title("a rank's memory before the step, and what it gathers")
    wire_axes.set(xlabel="MB", title="sent per step")
    time_axes.set(xlabel="× stage 0, quartiles", title="time of a step")
    memory_axes.invert_yaxis()
    for axes in panels:
        axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for the numbers
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = memory_axes.get_legend_handles_labels()
    measured = {}
    for handle, name in zip(handles, names, strict=True):
        measured.setdefault(name, handle)  # the formula's pale bar, of the same name, comes after it
    drawing.legend(measured.values(), measured.keys(), frameon=False, ncols=4, loc="outside lower left")
    plt.close(drawing)
    return drawing


def _draw_bytes(axes, row: int, mine_mb: dict[str, float], told_mb: dict[str, float]) -> None:
    """Stack what was measured, and below it, pale and thin, what the formula says."""
    from shared.plots import COLORS, HATCHES

    for y, height, opacity, parts, size, by in (
        (row - 0.16, 0.36, 1.0, mine_mb, 9, ""),
        (row + 0.22, 0.22, 0.45, told_mb, 7, " by formula" if len(told_mb) > 1 else ""),
    ):
        left = 0.0
        for number, (name, held_mb) in enumerate(parts.items()):
            place = number if len(parts) > 1 else len(COLORS) - 1
            style = {"facecolor": COLORS[place], "hatch": HATCHES[number], "alpha": opacity, "linewidth": 0.6}
            axes.barh(y, held_mb, height, left=left, edgecolor="black", label=name, **style)
            left += held_mb
        axes.text(left, y, f" {left:.{0 if len(parts) > 1 else 1}f}{by}", va="center", size=size)


def _draw_time(axes, row: int, ratios: list[float]) -> None:
    from shared.plots import HATCHES

    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    axes.barh(row, middle, 0.5, facecolor="white", edgecolor="black", hatch=HATCHES[1], linewidth=0.6)
    axes.plot([low, high], [row, row], color="black", linewidth=2.0)
    axes.text(high, row, f"  {middle:.2f}", va="center", size=9)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one model at ZeRO's stages 0 to 3.")
    parser.add_argument("--figure", metavar="FILE.png", help="draw it there")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds of steps ({ROUNDS})")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    found_on = report.machine()
    from benchmarks.stages import on_a_rank  # as __main__'s, it would travel without this file's names

    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(WORLD_SIZE, detect_mismatch=False)
    try:
        found = ranks.run(on_a_rank, options.rounds, timeout_s=600.0)[0]
    finally:
        ranks.stop()
    formulas = [predicted(stage) for stage in range(len(STAGES))]
    print("  ".join(f"{name} {value}" for name, value in found_on.items()))
    print(as_table(found, formulas))
    if options.figure:
        figure(found, formulas).savefig(options.figure, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
