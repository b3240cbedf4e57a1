"""Measure every strategy on this machine's GPUs through NCCL: time, memory and MFU, beside plain training and formulas.

    python -m benchmarks.gpu                        # tables
    python -m benchmarks.gpu --folder build/gpu     # also write report.json, report.md and report.png there
    python -m benchmarks.gpu --dry                  # a tiny model, even without a GPU, to see whether it runs

There is one rank per GPU. A machine with several GPUs also measures one rank alone. A single GPU is also shared by two
ranks if NCCL allows it (see shared/ranks/nccl.py), and their times can be compared only with each other.

The model is a GPT in bf16 with AdamW, whose state takes STATE_SHARE of a rank's memory. Strategies therefore run one
after another, and plain training runs before the first and after each of them: a ratio compares with the plain rounds
before and after. Plain training sends nothing. The report names each strategy that fails, with the reason, and the
others still run. It is written again after each strategy. A missed aim is reported, but is not a failure.

MFU is (6Ψ + 12·L·D·T) FLOPs per token (Chowdhery et al. 2022, "PaLM", appendix B; causal attention not halved), times
tokens per second, over the GPU's dense bf16 peak according to NVIDIA's data sheets.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import report
from benchmarks.gpu_training import DRY, Measurement, Training, on_a_rank, parameters_of
from benchmarks.rungs import ALONE, ON_A_GPU, beside
from shared import formulas, ranks
from shared.formulas import BytesPerParameter
from shared.models import GPTConfig
from shared.ranks import devices, nccl
from solutions.strategies import STRATEGIES

PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12}
BF16_ADAM = BytesPerParameter(parameter=2, gradient=2, optimizer=4)
STATE_SHARE = 0.4
MOST_OVER_PLAIN = 1.02
NEXT_TO_PLAIN = [STRATEGIES[name].title for name in ("overlapped_ddp", "zero1", "zero2", "zero3")]
ZERO3 = beside("zero3", 1.0)
TIMEOUT_S = 900.0
GB = 1e9


# -- results


@dataclass(frozen=True)
class Row:
    """The results of one strategy on one number of ranks."""

    ranks: int
    strategy: str
    ms: float
    over_plain: float
    mfu: float | None
    held_gb: float
    formula_gb: float
    peak_gb: float
    loss: float


@dataclass(frozen=True)
class Failed:
    """A strategy that could not be measured."""

    ranks: int
    strategy: str
    reason: str


@dataclass
class Results:
    """What was measured so far, and what failed."""

    machine: dict
    training: Training
    rows: list[Row] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    placements: dict[str, str] = field(default_factory=dict)  # where the ranks ran, by their number

    def to_dict(self) -> dict:
        found = [
            {"what": aim.what, "unit": aim.unit, "value": aim.median, "most": aim.target, "met": aim.met}
            for aim in aims(self.rows)
        ]
        lists = {"rows": [asdict(row) for row in self.rows], "failed": [asdict(each) for each in self.failed]}
        about = {"machine": self.machine, "training": asdict(self.training), "placements": self.placements}
        return {**about, **lists, "aims": found}


def measure(world_size: int, results: Results, gpu_name: str, save: Callable[[], None]) -> None:
    """Measure every strategy on one number of ranks, and add its row, or the reason why there is none."""
    training, plain = results.training, []

    def run(name: str) -> Measurement | None:
        print(f"Measuring {name} on {ranks_text(world_size)}.", file=sys.stderr, flush=True)
        try:
            per_rank = ranks.run(on_a_rank, name, training, timeout_s=TIMEOUT_S)
        except ranks.RanksError as error:
            results.failed.append(Failed(world_size, name, " ".join(str(error).split())[:400]))
            return None
        slowest_s = [max(times) for times in zip(*(measured.times_s for measured in per_rank), strict=True)]
        return replace(max(per_rank, key=lambda measured: measured.peak_bytes), times_s=slowest_s)

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ranks.start(world_size, detect_mismatch=False)
        placement = ranks.current().placement
        results.placements[str(world_size)] = f"{placement.backend} on {', '.join(placement.devices)}"
        if training != DRY and "cpu" in placement.devices:  # the CPU would need hours for this model
            raise ranks.RanksError(placement.valid)
        for name in ON_A_GPU:
            measured = run(name)
            if name == ALONE:
                plain = [measured]
            elif measured is not None:
                plain.append(run(ALONE))
            beside_s = [time_s for each in plain[-2:] if each is not None for time_s in each.times_s]
            if measured is not None and beside_s:
                results.rows.append(as_row(world_size, name, measured, beside_s, training, gpu_name))
            save()
    except ranks.RanksError as error:
        results.failed.append(Failed(world_size, "starting ranks", " ".join(str(error).split())[:400]))
        save()
    finally:
        ranks.stop()


def as_row(
    world_size: int, name: str, measured: Measurement, plain_s: list[float], training: Training, gpu_name: str
) -> Row:
    took_s = statistics.median(measured.times_s)
    parameters = parameters_of(training.config)
    formula_bytes = formulas.model_state_bytes(parameters, world_size, STAGES[name], BF16_ADAM)
    return Row(
        ranks=world_size,
        strategy=name,
        ms=1e3 * took_s,
        over_plain=took_s / statistics.median(plain_s),
        mfu=mfu(training, took_s, gpu_name),
        held_gb=measured.held_bytes / GB,
        formula_gb=formula_bytes / GB,
        peak_gb=measured.peak_bytes / GB,
        loss=measured.losses[-1],
    )


STAGES = {ALONE: 0} | {strategy.title: strategy.stage for strategy in STRATEGIES.values()}


def mfu(training: Training, took_s: float, gpu_name: str) -> float | None:
    """Return the fraction of the GPU's peak that the model's own FLOPs reach, or None if that peak is unknown."""
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu_name), None)
    if peak is None:
        return None
    config = training.config
    flops_per_token = 6 * parameters_of(config) + 12 * config.layers * config.width * config.context
    return flops_per_token * training.micro_batch * config.context / took_s / peak


def sized_for(
    gpu_bytes: int, state_share: float = STATE_SHARE, width: int = 4096, context: int = 1024, vocab_size: int = 32_000
) -> Training:
    """Choose a GPT whose state in bf16 takes a given share of a GPU's memory."""
    if gpu_bytes < 40 * GB:
        width //= 2
    one_layer = GPTConfig(vocab_size=vocab_size, context=context, layers=1, heads=width // 128, width=width)
    two_layers = parameters_of(replace(one_layer, layers=3)) - parameters_of(one_layer)
    room = state_share * gpu_bytes / BF16_ADAM.total - parameters_of(one_layer)
    return Training(replace(one_layer, layers=max(1, 1 + int(2 * room / two_layers))), micro_batch=4)


def ranks_text(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def aims(rows: list[Row]) -> list[report.Row]:
    """Compare our strategies on one GPU with plain training, and ZeRO3 with FSDP2 on every number of ranks."""
    by_strategy = {(row.ranks, row.strategy): row for row in rows}
    report_rows = []
    for (world_size, name), row in by_strategy.items():
        if world_size == 1 and name in NEXT_TO_PLAIN:
            report_rows.append(report.Row(f"1 rank: {name} / plain", "×", [row.over_plain], MOST_OVER_PLAIN))
        if name == ZERO3.mine and (world_size, ZERO3.other) in by_strategy:
            ratio = row.ms / by_strategy[world_size, ZERO3.other].ms
            report_rows.append(
                report.Row(f"{ranks_text(world_size)}: {name} / {ZERO3.other}", "×", [ratio], ZERO3.most)
            )
    return report_rows


def as_markdown(results: Results) -> str:
    config, parameters = results.training.config, parameters_of(results.training.config)
    description = (
        f"GPT of {parameters / 1e9:.2f} billion parameters ({config.layers} layers of {config.width}) in bf16, AdamW, "
    )
    description += f"{results.training.micro_batch} sequences of {config.context} tokens per rank"
    lines = [", ".join(f"{name} {value}" for name, value in results.machine.items()), "", description, ""]
    lines += ["| ranks | strategy | ms | × plain | MFU | held, GB | formula, GB | peak, GB | loss |", "|" + "---|" * 9]
    for row in results.rows:
        times = [f"{row.ms:.1f}", f"{row.over_plain:.3f}", "" if row.mfu is None else f"{row.mfu:.1%}"]
        sizes = [f"{size:.2f}" for size in (row.held_gb, row.formula_gb, row.peak_gb)]
        lines.append("| " + " | ".join([str(row.ranks), row.strategy, *times, *sizes, f"{row.loss:.3f}"]) + " |")
    lines += ["", *(f"- world size {size}: {where}" for size, where in results.placements.items())]
    lines += [*(f"- {each.strategy} on {ranks_text(each.ranks)} failed: {each.reason}" for each in results.failed)]
    return "\n".join([*lines, "", "```", report.as_table(aims(results.rows)), "```", ""])


def figure(rows: list[Row]):
    """Draw the rows: times on the left, memory on the right."""
    import matplotlib.pyplot as plt

    drawing, (times, sizes) = plt.subplots(
        1, 2, figsize=(10, 0.8 + report.GPU_ROW_IN * len(rows)), sharey=True, layout="constrained"
    )
    report.draw_gpu_rows(times, sizes, [asdict(row) for row in rows])
    drawing.legend(*sizes.get_legend_handles_labels(), frameon=False, ncols=3, loc="outside upper right")
    plt.close(drawing)
    return drawing


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the course's strategies on GPUs through NCCL.")
    parser.add_argument("--folder", type=Path, help="write report.json, report.md and report.png to this folder")
    parser.add_argument("--dry", action="store_true", help="train a tiny model for two rounds, even without a GPU")
    parser.add_argument("--state-share", type=float, default=STATE_SHARE, help="of a rank's memory, for the state")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    shares = gpus == 1 and dist.is_nccl_available() and not devices.why_not_shared(gpus, 2)
    if not gpus and not options.dry:
        print("This machine has no CUDA GPU. Use --dry to see whether this benchmark runs.", file=sys.stderr)
        return 2
    gpu_name = torch.cuda.get_device_name(0) if gpus else "CPU"
    training = DRY
    if not options.dry:
        room_bytes = torch.cuda.get_device_properties(0).total_memory // (2 if shares else 1)
        training = sized_for(room_bytes, options.state_share)
    machine_info = report.machine() | {"GPU": gpu_name, "GPUs": gpus, "NCCL": nccl_version()}
    results = Results(machine_info, training)

    def save() -> None:
        if options.folder:
            options.folder.mkdir(parents=True, exist_ok=True)
            (options.folder / "report.md").write_text(as_markdown(results), encoding="utf-8")
            (options.folder / "report.json").write_text(json.dumps(results.to_dict(), indent=1), encoding="utf-8")

    sizes = {1, gpus} if gpus else set()  # without a GPU, this is a dry run
    for world_size in sorted(sizes | ({2} if shares or (options.dry and gpus != 1) else set())):
        measure(world_size, results, gpu_name, save)
    print(as_markdown(results))
    if options.folder and results.rows:
        figure(results.rows).savefig(options.folder / "report.png", dpi=150)
    return 1 if results.failed or not results.rows else 0


def nccl_version() -> str:
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return nccl.named(nccl.version_for_ranks()) if has_nccl else "none"


if __name__ == "__main__":
    sys.exit(main())
