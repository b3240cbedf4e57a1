"""Train one model at ZeRO's stages 0 to 3, and draw the memory of a rank, the bytes it sends, and the time per step.

    python -m benchmarks.stages                                     # a table
    python -m benchmarks.stages --figure source/images/stages.png   # the page's figure

Bytes are compared with the formulas of `shared/formulas.py`. The stages take turns, and times are ratios to stage 0 in
the same round.
"""

import argparse
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
from shared.formulas import FP32_ADAM, BytesPerParameter, model_state_bytes, step_sent_bytes
from shared.ranks import rankside
from solutions.strategies import STRATEGIES

WORLD_SIZE, ROUNDS, WARM_UP_ROUNDS = 4, 30, 3
OURS = [STRATEGIES[name] for name in ("overlapped_ddp", "zero1", "zero2", "zero3")]
STAGES = [f"stage {strategy.stage}: {strategy.title}" for strategy in OURS]
STATE = ("parameters", "gradients", "optimizer")
MB = 1e6


@dataclass(frozen=True)
class StageResult:
    """The measurements of one stage on one rank, or the predictions of the formulas."""

    held_mb: dict[str, float]  # between backward and step; "gathered" is what the parameters' peak adds
    sent_mb: float
    ratios: list[float]  # the time of a step over that of stage 0, in each round


# -- on a rank


def backward_of(model, optimizer, inputs) -> Callable[[], None]:
    finish = getattr(model, "finish_gradient_sync", getattr(optimizer, "reduce_gradients", None))

    def backward() -> None:
        optimizer.zero_grad()
        model(*inputs).backward()
        finish()

    return backward


def on_a_rank(rounds: int, warm_up_rounds: int = WARM_UP_ROUNDS) -> list[StageResult]:
    """Measure every stage. Runs on every rank."""
    device, trained = torch.device(rankside.here.device), []
    for strategy in OURS:
        module, inputs = MODELS["TinyGPT"]()
        model, optimizer = strategy.build(module.to(device), ADAMW)
        trained.append((model, optimizer, backward_of(model, optimizer, [tensor.to(device) for tensor in inputs])))
    took_s = [[] for _ in trained]
    for round_index in range(rounds + warm_up_rounds):
        for stage in random.Random(round_index).sample(range(len(trained)), len(trained)):
            _, optimizer, backward = trained[stage]
            dist.barrier()
            began_s = time.perf_counter()
            backward()
            optimizer.step()
            dist.barrier()  # a step lasts until its slowest rank is done
            took_s[stage].append(time.perf_counter() - began_s)
    ratios = [[mine / stage_0 for mine, stage_0 in zip(times, took_s[0], strict=True)] for times in took_s]
    return [
        _result_of(*training, stage_ratios[warm_up_rounds:])
        for training, stage_ratios in zip(trained, ratios, strict=True)
    ]


def _result_of(model, optimizer, backward, ratios: list[float]) -> StageResult:
    with wire.ledger() as log:
        backward()
        optimizer.step()
    with memory.peak(model, optimizer) as peak:
        backward()
        held = memory.held(model, optimizer)
        optimizer.step()
    held_mb = {name: held.by_component()[name] / MB for name in STATE}
    peak_mb = max(sample.held.parameters_bytes for sample in peak.samples) / MB
    return StageResult(held_mb | {"gathered": peak_mb - held_mb["parameters"]}, log.sent_bytes / MB, ratios)


# -- predictions of the formulas


def predicted(stage: int, world_size: int = WORLD_SIZE) -> StageResult:
    with torch.device("meta"):
        module, _ = MODELS["TinyGPT"]()
    counts = {unit: sum(p.numel() for p in unit.parameters()) for unit in (module, *module.blocks)}
    whole, *blocks = counts.values()
    held_mb = {}
    for name in STATE:
        kind = name.removesuffix("s")
        only = BytesPerParameter(**{"parameter": 0, "gradient": 0, "optimizer": 0, kind: getattr(FP32_ADAM, kind)})
        held_mb[name] = model_state_bytes(whole, world_size, stage, only) / MB
    root = whole - sum(blocks)
    gathered = root + 2 * max(blocks) if stage == 3 else 0  # the block that computes, and the next one
    # The root unit is all-gathered only once, because it stays unsharded from forward to backward.
    saved_bytes = root / whole * step_sent_bytes(whole, world_size, 2, 4) / 2 if stage == 3 else 0
    held_mb["gathered"] = FP32_ADAM.parameter * gathered / MB
    return StageResult(held_mb, (step_sent_bytes(whole, world_size, stage, FP32_ADAM.parameter) - saved_bytes) / MB, [])


# -- results


def as_table(measured: list[StageResult], formulas: list[StageResult]) -> str:
    lines = [["", "held MB", "formula", "gathered MB", "formula", "sent MB", "formula", "time ratio"]]
    for name, result, formula in zip(STAGES, measured, formulas, strict=True):
        pairs = [(sum(each.held_mb[part] for part in STATE) for each in (result, formula))]
        pairs += [(each.held_mb["gathered"] for each in (result, formula)), (result.sent_mb, formula.sent_mb)]
        cells = [f"{value:.1f}" for pair in pairs for value in pair]
        lines.append([name, *cells, f"{statistics.median(result.ratios):.2f}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def figure(measured: list[StageResult], formulas: list[StageResult]):
    """Draw memory, bytes sent and time side by side, one row per stage, with the formula below each bar of bytes."""
    import matplotlib.pyplot as plt

    size = {"figsize": (11.0, 3.2), "width_ratios": (3, 1.3, 1.3)}
    drawing, panels = plt.subplots(1, 3, sharey=True, layout="constrained", **size)
    memory_axes, wire_axes, time_axes = panels
    for row, (result, formula) in enumerate(zip(measured, formulas, strict=True)):
        _draw_bytes(memory_axes, row, result.held_mb, formula.held_mb)
        _draw_bytes(wire_axes, row, {"sent": result.sent_mb}, {"sent": formula.sent_mb})
        _draw_time(time_axes, row, result.ratios)
    memory_axes.set(yticks=range(len(measured)), yticklabels=STAGES, xlabel="MB")
    memory_axes.set_title("memory of a rank before the step, and gathered parameters")
    wire_axes.set(xlabel="MB", title="sent per step")
    time_axes.set(xlabel="ratio to stage 0, with quartiles", title="time per step")
    memory_axes.invert_yaxis()
    for axes in panels:
        axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for the numbers
        axes.spines[["top", "right"]].set_visible(False)
    handles, names = memory_axes.get_legend_handles_labels()
    legend = {}
    for handle, name in zip(handles, names, strict=True):
        legend.setdefault(name, handle)  # the first handle of a name is the measured bar, the second one the formula's
    drawing.legend(legend.values(), legend.keys(), frameon=False, ncols=4, loc="outside lower left")
    plt.close(drawing)
    return drawing


def _draw_bytes(axes, row: int, measured_mb: dict[str, float], formula_mb: dict[str, float]) -> None:
    """Stack the measured components, and below them, pale and thin, those of the formula."""
    from shared.plots import COLORS, HATCHES

    for y, height, opacity, parts, size, source in (
        (row - 0.16, 0.36, 1.0, measured_mb, 9, ""),
        (row + 0.22, 0.22, 0.45, formula_mb, 7, " by formula" if len(formula_mb) > 1 else ""),
    ):
        left = 0.0
        for index, (name, part_mb) in enumerate(parts.items()):
            color = COLORS[index] if len(parts) > 1 else COLORS[-1]
            style = {"facecolor": color, "hatch": HATCHES[index], "alpha": opacity, "linewidth": 0.6}
            axes.barh(y, part_mb, height, left=left, edgecolor="black", label=name, **style)
            left += part_mb
        axes.text(left, y, f" {left:.{0 if len(parts) > 1 else 1}f}{source}", va="center", size=size)


def _draw_time(axes, row: int, ratios: list[float]) -> None:
    from shared.plots import HATCHES

    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    axes.barh(row, middle, 0.5, facecolor="white", edgecolor="black", hatch=HATCHES[1], linewidth=0.6)
    axes.plot([low, high], [row, row], color="black", linewidth=2.0)
    axes.text(high, row, f"  {middle:.2f}", va="center", size=9)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure one model at ZeRO's stages 0 to 3.")
    parser.add_argument("--figure", metavar="FILE.png", help="write the figure to this file")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds of steps (default: {ROUNDS})")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    machine_info = report.machine()
    from benchmarks.stages import (
        on_a_rank,
    )  # a function of __main__ would be sent to the ranks without this file's names

    with report.started(WORLD_SIZE):
        measured = ranks.run(on_a_rank, options.rounds, timeout_s=600.0)[0]
    formulas = [predicted(stage) for stage in range(len(STAGES))]
    print("  ".join(f"{name} {value}" for name, value in machine_info.items()))
    print(as_table(measured, formulas))
    if options.figure:
        figure(measured, formulas).savefig(options.figure, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
