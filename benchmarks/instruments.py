"""Measure what the instruments cost: a training step with the ledger or the timeline open, over one without.

    python -m benchmarks.instruments            # one table
    python -m benchmarks.instruments --json     # the same, for programs

The kinds take turns within one run, and each pair of neighbours gives one ratio, so that a busy moment meets both.
"""

import argparse
import contextlib
import io
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist

from benchmarks.report import Row, machine, show
from shared import ranks, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT

WORLD_SIZE = 2
STEPS_EACH = 3  # a step is short: several make one measurement


def ratios_on_a_rank(rounds: int) -> dict[str, list[float]]:
    """Time steps of TinyGPT, plain and recorded, in turns; runs on every rank."""
    text = CharTokens()
    inputs = text.windows(range(0, 1600, 100), length=64)
    model = TinyGPT(GPTConfig(vocab_size=text.vocab_size), seed=0)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def step_ms(recording) -> float:
        dist.barrier()
        with recording:
            began_s = time.perf_counter()
            for _ in range(STEPS_EACH):
                wrapped(*inputs).backward()
            return 1e3 * (time.perf_counter() - began_s)

    kinds = {"wire.ledger": wire.ledger, "timeline.record": lambda: timeline.record(wrapped), "nothing": nullcontext}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds + 2):
        for name, recording in kinds.items():
            plain_ms, recorded_ms = step_ms(nullcontext()), step_ms(recording())
            found[name].append(recorded_ms / plain_ms)
    return {name: ratios[2:] for name, ratios in found.items()}  # the first two warm up


def measure(rounds: int) -> list[Row]:
    from benchmarks.instruments import ratios_on_a_rank  # as __main__'s, it would travel without this file's names

    ranks.start(WORLD_SIZE, detect_mismatch=False)
    try:
        of_ranks = ranks.run(ratios_on_a_rank, rounds, timeout_s=600)
    finally:
        ranks.stop()
    aims = {"wire.ledger": 1.03}
    return [
        Row(
            f"a step with {name} / one without",
            "×",
            [ratio for found in of_ranks for ratio in found[name]],
            aims.get(name),
        )
        for name in of_ranks[0]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the instruments cost.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--rounds", type=int, default=60, metavar="N", help="pairs of measurements of each kind (60)")
    options = parser.parse_args()
    found_on = machine()
    with contextlib.redirect_stdout(io.StringIO()):
        rows = measure(options.rounds)
    return show(found_on, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
