"""Measure every rung on this machine's GPUs through NCCL: time beside plain training, memory beside the formula, MFU.

    python -m benchmarks.gpu                        # tables
    python -m benchmarks.gpu --folder build/gpu     # and report.json, report.md, report.png there
    python -m benchmarks.gpu --dry                  # a tiny model, on the CPU where there is no GPU: whether it runs

One rank per GPU; where there are several, one rank alone as well. The model is a GPT in bf16 with AdamW, whose state
takes STATE_SHARE of a card. So strategies have the card one after another, and plain training comes before the first
and after each: a ratio is to the plain rounds on both sides. On several GPUs plain training sends nothing.

MFU is (6Ψ + 12·L·D·T) flops per token (Chowdhery et al. 2022, "PaLM", appendix B; causal attention not halved), times
tokens per second, over the card's dense bf16 peak as NVIDIA's data sheets state it.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.gpu_training import DRY, Found, Training, on_a_rank, parameters_of
from benchmarks.rungs import ALONE, ON_A_GPU, beside
from shared import formulas, ranks
from shared.formulas import BytesPerParameter
from shared.models import GPTConfig
from solutions.strategies import STRATEGIES

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12}
BF16_ADAM = BytesPerParameter(parameter=2, gradient=2, optimizer=4)
STATE_SHARE = 0.4
MOST_OVER_PLAIN = 1.02
NEXT_TO_PLAIN = [STRATEGIES[name].title for name in ("overlapped_ddp", "zero1", "zero2", "zero3")]
ZERO3 = beside("zero3", 1.0)
TIMEOUT_S = 900.0
GB = 1e9


# -- what came of it


@dataclass(frozen=True)
class Row:
    """One strategy on one number of ranks."""

    ranks: int
    strategy: str
    ms: float
    over_plain: float
    mfu: float | None
    held_gb: float
    formula_gb: float
    peak_gb: float
    loss: float


def measure(world_size: int, training: Training, card: str) -> list[Row]:
    """Measure every strategy on one number of ranks."""
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(world_size, detect_mismatch=False)
    try:

        def run(name: str) -> Found:
            print(f"measuring on {world_size}: {name}", file=sys.stderr)
            found = ranks.run(on_a_rank, name, training, timeout_s=TIMEOUT_S)
            slowest_s = [max(times) for times in zip(*(each.times_s for each in found), strict=True)]
            return replace(max(found, key=lambda each: each.peak_bytes), times_s=slowest_s)

        plain = [run(ALONE)]
        rows = [as_row(world_size, ALONE, plain[0], plain[0].times_s, training, card)]
        for name in ON_A_GPU:
            if name != ALONE:
                found = run(name)
                plain.append(run(ALONE))
                beside_s = plain[-2].times_s + plain[-1].times_s
                rows.append(as_row(world_size, name, found, beside_s, training, card))
        return rows
    finally:
        ranks.stop()


def as_row(world_size: int, name: str, found: Found, plain_s: list[float], training: Training, card: str) -> Row:
    took_s = statistics.median(found.times_s)
    numbers = parameters_of(training.config)
    formula_bytes = formulas.model_state_bytes(numbers, world_size, STAGES[name], BF16_ADAM)
    return Row(
        ranks=world_size,
        strategy=name,
        ms=1e3 * took_s,
        over_plain=took_s / statistics.median(plain_s),
        mfu=mfu(training, took_s, card),
        held_gb=found.held_bytes / GB,
        formula_gb=formula_bytes / GB,
        peak_gb=found.peak_bytes / GB,
        loss=found.losses[-1],
    )


STAGES = {ALONE: 0} | {strategy.title: strategy.stage for strategy in STRATEGIES.values()}


def mfu(training: Training, took_s: float, card: str) -> float | None:
    """→ the share of the card's peak that the model's own flops are; None for a card whose peak is not listed"""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in card), None)
    if peak is None:
        return None
    config = training.config
    per_token = 6 * parameters_of(config) + 12 * config.layers * config.width * config.context
    return per_token * training.micro_batch * config.context / took_s / peak


def filling(gpu_bytes: int, width: int = 4096, context: int = 1024, vocab_size: int = 32_000) -> Training:
    """Choose a GPT whose state in bf16 takes STATE_SHARE of a card."""
    if gpu_bytes < 40 * GB:
        width //= 2
    one = GPTConfig(vocab_size=vocab_size, context=context, layers=1, heads=width // 128, width=width)
    two_more = parameters_of(replace(one, layers=3)) - parameters_of(one)
    room = STATE_SHARE * gpu_bytes / BF16_ADAM.total - parameters_of(one)
    return Training(replace(one, layers=max(1, 1 + int(2 * room / two_more))), micro_batch=4)


def aims(rows: list[Row]) -> list[report.Row]:
    """Hold our rungs on one GPU against plain training, and ZeRO3 everywhere against FSDP2."""
    found = {(row.ranks, row.strategy): row for row in rows}
    held = []
    for (world_size, name), row in found.items():
        if world_size == 1 and name in NEXT_TO_PLAIN:
            held.append(report.Row(f"1 rank: {name} / plain", "×", [row.over_plain], MOST_OVER_PLAIN))
        if name == ZERO3.mine:
            ratio = row.ms / found[world_size, ZERO3.other].ms
            held.append(report.Row(f"{world_size} ranks: {name} / {ZERO3.other}", "×", [ratio], ZERO3.most))
    return held


def as_markdown(found_on: dict, training: Training, rows: list[Row]) -> str:
    config, numbers = training.config, parameters_of(training.config)
    what = f"GPT of {numbers / 1e9:.2f} billion parameters ({config.layers} layers of {config.width}) in bf16, AdamW, "
    what += f"{training.micro_batch} sequences of {config.context} tokens per rank"
    lines = [", ".join(f"{name} {value}" for name, value in found_on.items()), "", what, ""]
    lines += ["| ranks | | ms | × plain | MFU | held, GB | formula, GB | peak, GB | loss |", "|" + "---|" * 9]
    for row in rows:
        times = [f"{row.ms:.1f}", f"{row.over_plain:.3f}", "" if row.mfu is None else f"{row.mfu:.1%}"]
        sizes = [f"{size:.2f}" for size in (row.held_gb, row.formula_gb, row.peak_gb)]
        lines.append("| " + " | ".join([str(row.ranks), row.strategy, *times, *sizes, f"{row.loss:.3f}"]) + " |")
    return "\n".join([*lines, "", "```", report.as_table(aims(rows)), "```", ""])


def figure(rows: list[Row]):
    """Draw time beside plain training, and memory held beside the formula, a row per strategy and number of ranks."""
    import matplotlib.pyplot as plt

    from shared.plots import COLORS, HATCHES

    drawing, (times, sizes) = plt.subplots(
        1, 2, figsize=(10, 0.8 + 0.42 * len(rows)), sharey=True, layout="constrained"
    )
    names = [f"{row.strategy}, {row.ranks}" for row in rows]
    edge = {"edgecolor": "black", "linewidth": 0.6}
    drawn = times.barh(names, [row.over_plain for row in rows], facecolor=COLORS[0], **edge)
    times.bar_label(drawn, [f"{row.over_plain:.2f}" for row in rows], padding=3, size=8)
    times.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    places = range(len(rows))
    style = {"height": 0.36, **edge}
    sizes.barh([y - 0.2 for y in places], [row.held_gb for row in rows], facecolor=COLORS[1], label="held", **style)
    formula = {"facecolor": COLORS[2], "hatch": HATCHES[1], "label": "formula"}
    sizes.barh([y + 0.2 for y in places], [row.formula_gb for row in rows], **formula, **style)
    sizes.plot([row.peak_gb for row in rows], places, "k|", markersize=12, label="allocator's peak")
    times.set(xlabel="× plain training", title="time of a step")
    sizes.set(xlabel="GB", title="memory before the step")
    for axes in (times, sizes):
        axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
        axes.spines[["top", "right"]].set_visible(False)
    times.invert_yaxis()
    drawing.legend(*sizes.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper right")
    plt.close(drawing)
    return drawing


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the rungs on GPUs through NCCL.")
    parser.add_argument("--folder", type=Path, help="write report.json, report.md and report.png there")
    parser.add_argument("--dry", action="store_true", help="a tiny model and two rounds, on the CPU too")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus and not options.dry:
        print("There is no CUDA GPU here. --dry shows whether this benchmark runs.", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name(0) if gpus else "CPU"
    training = DRY
    if not options.dry:
        training = filling(torch.cuda.get_device_properties(0).total_memory)
    found_on = report.machine() | {"card": card, "cards": gpus, "NCCL": ".".join(map(str, nccl_version()))}
    rows = []
    for world_size in sorted({1, max(1, gpus)} | ({2} if options.dry and gpus != 1 else set())):
        rows += measure(world_size, training, card)
    text = as_markdown(found_on, training, rows)
    print(text)
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / "report.md").write_text(text)
        everything = {"machine": found_on, "training": asdict(training), "rows": [asdict(row) for row in rows]}
        (options.folder / "report.json").write_text(json.dumps(everything, indent=1))
        figure(rows).savefig(options.folder / "report.png", dpi=150)
    return 0 if all(row.met for row in aims(rows)) or options.dry else 1


def nccl_version() -> tuple:
    return torch.cuda.nccl.version() if torch.cuda.is_available() and dist.is_nccl_available() else ("none",)


if __name__ == "__main__":
    sys.exit(main())
