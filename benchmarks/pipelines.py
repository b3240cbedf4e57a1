"""Compare the course's pipelines with torch.distributed.pipelining, and measured bubbles with their formulas.

    python -m benchmarks.pipelines                 # two tables
    python -m benchmarks.pipelines --readme        # replace them in README.md
    python -m benchmarks.pipelines --quick         # few rounds, to see whether it runs
    python -m benchmarks.pipelines --figure source/images/schedules.png   # only the page's figure

Both train the same layers on the same batch. In each round, both take one step, in an order that is shuffled in the
same way on all ranks. A step lasts until its slowest rank is done. Ratios are computed within each round, and the table
shows their median. The bubbles are those of ranks that sleep in place of computing; see `shared/measure/pipelines.py`.
"""

import argparse
import random
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import report
from benchmarks.ladder import QUICK_ROUNDS, README, WARM_UP_ROUNDS
from shared import ranks
from shared.measure.pipelines import sleeping_pipeline
from shared.plots import pipeline as pipeline_plots
from shared.ranks import rankside
from shared.wire import instrumentation
from solutions import pipeline_schedules
from solutions.pipeline import Pipeline

ROUNDS, BUBBLE_ROUNDS, TIMEOUT_S = 20, 3, 900.0
WORLD_SIZES = (2, 4)
MICRO_BATCHES, SAMPLES, WIDTH, LAYERS = 8, 512, 512, 8
SLEEPS_S = 1.92, 3.84  # all forwards of a stage, and all its backwards: long, because a message takes half a ms
MOST_TIME = 1.0  # of torch's
MOST_EXCESS = 1.05  # of the bubble that the formula gives
TORCHS = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
BUBBLES = {  # of the ideal time, with two chunks per stage
    "GPipe": (lambda p, m: pipeline_schedules.gpipe(p, m), lambda p, m: (p - 1) / m),
    "1F1B": (lambda p, m: pipeline_schedules.one_f_one_b(p, m), lambda p, m: (p - 1) / m),
    "interleaved": (lambda p, m: pipeline_schedules.interleaved(p, m, 2), lambda p, m: (p - 1) / (2 * m)),
    "zero bubble": (lambda p, m: pipeline_schedules.zero_bubble(p, m), lambda p, m: (p - 1) / (3 * m)),
}


def stack(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]).to(device)


def torchs_step(schedule: str, device: torch.device):
    """Return a function that takes a step with torch's pipeline."""
    from torch.distributed import pipelining

    stage, stages = dist.get_rank(), dist.get_world_size()
    own = stack(device)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
    built = pipelining.PipelineStage(own, stage, stages, device)
    runs = getattr(pipelining, TORCHS[schedule])(built, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        own.zero_grad()
        runs.step(*(inputs,) if stage == 0 else (), target=targets if stage == stages - 1 else None)

    return step


def our_step(schedule: str, device: torch.device):
    """Return a function that takes a step with our pipeline."""
    pipeline = Pipeline(stack(device), schedule, MICRO_BATCHES)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        for parameter in pipeline.stage_parameters().values():
            parameter.grad = None
        pipeline.step(inputs, targets)

    return step


def on_a_rank(rounds: int) -> dict[str, list[float]]:
    """Return the ms of each round of both pipelines, by schedule. Runs on every rank."""
    device = torch.device(rankside.here.device)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(2, SAMPLES, WIDTH, generator=generator).to(device)
    steps = {name: our_step(name, device) for name in TORCHS}
    steps |= {torchs: torchs_step(name, device) for name, torchs in TORCHS.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    for round_index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(round_index).sample(list(steps), len(steps)):
            dist.barrier()
            began_s = time.perf_counter()
            steps[name](*batch)
            instrumentation.synchronize()
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    return {name: times[WARM_UP_ROUNDS:] for name, times in times_ms.items()}


def compare_times(size: int, rounds: int) -> tuple[list[list[str]], list[report.Row]]:
    """Return the lines of the first table, and the aims."""
    from benchmarks.pipelines import on_a_rank  # a function of __main__ could not be sent to the ranks

    per_rank = ranks.run(on_a_rank, rounds, timeout_s=TIMEOUT_S)
    times_ms = {name: [max(each) for each in zip(*(of[name] for of in per_rank), strict=True)] for name in per_rank[0]}
    lines, aims = [], []
    for name, torchs in TORCHS.items():
        ratios = [ours / theirs for ours, theirs in zip(times_ms[name], times_ms[torchs], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        aims.append(report.Row(f"{size} ranks: time, {name} / {torchs}", "×", ratios, MOST_TIME))
        spread = f"{aims[-1].median:.2f} ({low:.2f}–{high:.2f})"
        for title, ratio in ((name, spread), (torchs, "1.00")):
            lines.append([str(size), title, f"{statistics.median(times_ms[title]):.1f}", ratio])
    return lines, aims


def compare_bubbles(size: int, rounds: int) -> tuple[list[list[str]], list[report.Row]]:
    """Return the lines of the second table, and the aims."""
    lines, aims = [], []
    for name, (build, formula) in BUBBLES.items():
        schedule, expected = build(size, MICRO_BATCHES), formula(size, MICRO_BATCHES)
        times = [ranks.run(sleeping_pipeline, schedule, *SLEEPS_S) for _ in range(rounds)]
        measured = [pipeline_plots.measured(each) for each in times]
        fractions = [run.bubble_of_ideal / expected for run in measured]
        aims.append(report.Row(f"{size} ranks: bubble, {name} / formula", "×", fractions, MOST_EXCESS))
        found = statistics.median(run.bubble_of_ideal for run in measured)
        lines.append([str(size), name, f"{found:.3f}", f"{expected:.3f}", f"{aims[-1].median:.2f}"])
    return lines, aims


def figure(size: int):
    """Draw one run of each schedule, on ranks that sleep."""
    runs = {}
    for name, (build, _) in BUBBLES.items():
        spans = ranks.run(sleeping_pipeline, build(size, MICRO_BATCHES), *SLEEPS_S)
        run = pipeline_plots.measured(spans)
        runs[f"{name}: bubble {run.bubble_of_total:.0%} of the total time"] = run
    return pipeline_plots.schedule(runs)


def as_markdown(tables: dict[tuple[str, ...], list[list[str]]], aims: list[report.Row], rounds: int) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in report.machine().items())
    text = [
        f"**{sum(bool(row.met) for row in aims)} of {len(aims)} aims are met.** One run of {rounds} rounds: {machine}."
    ]
    for header, lines in tables.items():
        text.append("")
        text += ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the course's pipelines with torch's.")
    parser.add_argument("--readme", action="store_true", help="replace the tables in benchmarks/README.md")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"rounds (default: {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK_ROUNDS} rounds")
    parser.add_argument("--figure", metavar="FILE.png", help="only write the README's figure to this file")
    options = parser.parse_args()
    if options.figure:
        with report.started(max(WORLD_SIZES)):
            figure(max(WORLD_SIZES)).savefig(options.figure, dpi=150)
        return 0
    rounds = QUICK_ROUNDS if options.quick else options.rounds
    times, bubbles, aims = [], [], []
    for size in WORLD_SIZES:
        with report.started(size):
            for lines, compare, count in ((times, compare_times, rounds), (bubbles, compare_bubbles, BUBBLE_ROUNDS)):
                found, further = compare(size, count)
                lines += found
                aims += further
    tables = {
        ("ranks", "schedule", "ms", "ratio (quartiles)"): times,
        ("ranks", "schedule", "bubble of the ideal time", "formula", "ratio"): bubbles,
    }
    text = as_markdown(tables, aims, rounds)
    print(text, report.as_table(aims), sep="\n\n")
    if options.readme:
        report.put_between(README, "pipelines", text)
    return 0 if all(row.met for row in aims) else 1


if __name__ == "__main__":
    sys.exit(main())
