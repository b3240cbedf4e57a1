"""Measure the overhead of the instruments: a training step with the ledger or the timeline, relative to one without.

    python -m benchmarks.instruments            # one table
    python -m benchmarks.instruments --json     # the same as JSON

Steps with and without an instrument alternate within one run, and each adjacent pair gives one ratio. A busy moment of
the machine therefore affects both sides of a ratio.
"""

import argparse
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.report import Row, machine, show, started
from shared import ranks, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

WORLD_SIZE = 2
STEPS_PER_MEASUREMENT = 3  # one step is too short to be timed alone


def ratios_on_a_rank(rounds: int) -> dict[str, list[float]]:
    """Time steps of TinyGPT, plain and recorded in turn. Runs on every rank."""
    text = CharTokens()
    inputs = text.windows(range(0, 1600, 100), length=64)
    model = TinyGPT(GPTConfig(vocab_size=text.vocab_size), seed=0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def step_ms(recording) -> float:
        dist.barrier()
        with recording:
            began_s = time.perf_counter()
            for _ in range(STEPS_PER_MEASUREMENT):
                wrapped(*inputs).backward()
            return 1e3 * (time.perf_counter() - began_s)

    kinds = {"wire.ledger": wire.ledger, "timeline.record": lambda: timeline.record(wrapped), "nothing": nullcontext}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 2):
        for name, recording in kinds.items():
            plain_ms, recorded_ms = step_ms(nullcontext()), step_ms(recording())
            ratios[name].append(recorded_ms / plain_ms)
    return {name: of_kind[2:] for name, of_kind in ratios.items()}  # the first two are for warm-up


def measure(rounds: int) -> list[Row]:
    from benchmarks.instruments import (
        ratios_on_a_rank,
    )  # a function of __main__ would be sent to the ranks without this file's names

    with started(WORLD_SIZE):
        rank_ratios = ranks.run(ratios_on_a_rank, rounds, timeout_s=600)
    targets = {"wire.ledger": 1.03}
    return [
        Row(
            f"step with {name} / step without",
            "×",
            [ratio for ratios in rank_ratios for ratio in ratios[name]],
            targets.get(name),
        )
        for name in rank_ratios[0]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the overhead of the instruments.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--rounds", type=int, default=60, metavar="N", help="pairs of measurements per instrument (default: 60)"
    )
    options = parser.parse_args()
    machine_info = machine()
    return show(machine_info, measure(options.rounds), options.json)


if __name__ == "__main__":
    sys.exit(main())
