"""Measure the collectives of chapter 01 beside torch's own: all-reduce and reduce-scatter, by size.

    python -m benchmarks.collectives            # one table
    python -m benchmarks.collectives --json     # the same, for programs

Ours and torch's take turns within one run, so that a busy moment of the machine meets both. A round lasts until the
slowest rank is done. Times are medians over rounds; a ratio is the median of the rounds' own ratios, torch's time
over ours, so above 1 ours is the faster one.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.report import machine
from shared import ranks
from shared.formulas import all_reduce_sent_bytes
from shared.ranks import rankside
from solutions import collectives

SIZES_KIB = (64, 256, 1024, 4096, 16384, 65536)
ALL_REDUCE_AIM, ALL_REDUCE_AIM_FROM_KIB = 0.8, 16384  # of torch's bus bandwidth
REDUCE_SCATTER_AIM, REDUCE_SCATTER_AIM_FROM_KIB = 1.0, 1024  # of torch's, which is an all-reduce inside over gloo
WARM_UP_ROUNDS = 2  # they pay for connections and memory
TIMEOUT_S = 300.0


def _all_reduces(tensor: torch.Tensor) -> dict:
    return {"ring": lambda: collectives.ring_all_reduce(tensor), "torch": lambda: dist.all_reduce(tensor)}


def _reduce_scatters(tensor: torch.Tensor) -> dict:
    shard = tensor.new_empty(tensor.numel() // dist.get_world_size())
    torchs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "ring": lambda: collectives.ring_reduce_scatter(tensor),
        "direct": lambda: collectives.direct_reduce_scatter(tensor),
        "torch": lambda: torchs(shard, tensor),
    }


FAMILIES = {"all-reduce": _all_reduces, "reduce-scatter": _reduce_scatters}


def times_on_a_rank(family: str, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Call each of a family once per round, in turns; runs on every rank. → name → ms of each round"""
    tensor = torch.zeros(size_bytes // 4, device=rankside.here.device)
    bodies = FAMILIES[family](tensor)
    times_ms: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds + WARM_UP_ROUNDS):
        for name, body in bodies.items():
            dist.barrier()
            began_s = time.perf_counter()
            body()
            tensor[0].item()  # on a GPU it is this line that waits
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    return {name: times[WARM_UP_ROUNDS:] for name, times in times_ms.items()}


@dataclass(frozen=True)
class Cell:
    """One family at one size: ms of each round, the slowest rank's."""

    family: str
    size_kib: int
    times_ms: dict[str, list[float]]

    def median_ms(self, name: str) -> float:
        return statistics.median(self.times_ms[name])

    def ratio(self, name: str = "ring") -> float:
        pairs = zip(self.times_ms["torch"], self.times_ms[name], strict=True)
        return statistics.median(torchs / ours for torchs, ours in pairs)

    def bus_gb_per_s(self, name: str, world_size: int) -> float:
        return all_reduce_sent_bytes(1024 * self.size_kib, world_size) / self.median_ms(name) / 1e6

    @property
    def met(self) -> bool:
        if self.family == "all-reduce":
            return self.size_kib < ALL_REDUCE_AIM_FROM_KIB or self.ratio() >= ALL_REDUCE_AIM
        return self.size_kib < REDUCE_SCATTER_AIM_FROM_KIB or self.ratio() > REDUCE_SCATTER_AIM


def measure(world_size: int, rounds: int) -> dict[int, list[Cell]]:
    """→ size in KiB → one cell per family"""
    from benchmarks.collectives import times_on_a_rank  # as __main__'s, it would travel without this file's names

    found: dict[int, list[Cell]] = {}
    ranks.start(world_size, detect_mismatch=False)
    try:
        for size_kib in SIZES_KIB:
            for family in FAMILIES:
                of_ranks = ranks.run(times_on_a_rank, family, 1024 * size_kib, rounds, timeout_s=TIMEOUT_S)
                slowest = {n: [max(t) for t in zip(*(r[n] for r in of_ranks), strict=True)] for n in of_ranks[0]}
                found.setdefault(size_kib, []).append(Cell(family, size_kib, slowest))
    finally:
        ranks.stop()
    return found


def as_table(found: dict[int, list[Cell]], world_size: int) -> str:
    lines = [
        ["", "all-reduce", "ring", "torch", "ring", "torch", "ratio", "reduce-scatter", "ring", "direct", "torch",
         "ratio", "direct's", "met"],
        ["KiB", "", "ms", "ms", "GB/s", "GB/s", "×", "", "ms", "ms", "ms", "×", "×", ""],
    ]  # fmt: skip
    for size_kib, (reduced, scattered) in found.items():
        numbers = [reduced.median_ms("ring"), reduced.median_ms("torch")]
        numbers += [reduced.bus_gb_per_s(name, world_size) for name in ("ring", "torch")]
        first = [f"{number:.2f}" for number in [*numbers, reduced.ratio()]]
        numbers = [scattered.median_ms(name) for name in ("ring", "direct", "torch")]
        second = [f"{number:.2f}" for number in [*numbers, scattered.ratio(), scattered.ratio("direct")]]
        lines.append([str(size_kib), "", *first, "", *second, "yes" if reduced.met and scattered.met else "NO"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)


def as_json(found_on: dict, found: dict[int, list[Cell]]) -> str:
    cells = [
        {
            "family": cell.family,
            "size_kib": cell.size_kib,
            "median_ms": {name: cell.median_ms(name) for name in cell.times_ms},
            "ratio": {name: cell.ratio(name) for name in cell.times_ms if name != "torch"},
            "met": cell.met,
        }
        for cells_of_size in found.values()
        for cell in cells_of_size
    ]
    return json.dumps({"machine": found_on, "cells": cells}, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the collectives of chapter 01 beside torch's own.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="how many ranks (4)")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds of each size (30)")
    options = parser.parse_args()
    found_on = machine() | {"ranks": options.world_size}
    with contextlib.redirect_stdout(io.StringIO()):
        found = measure(options.world_size, options.rounds)
    if options.json:
        print(as_json(found_on, found))
    else:
        print("  ".join(f"{name} {value}" for name, value in found_on.items()))
        print(as_table(found, options.world_size))
    return 0 if all(cell.met for cells in found.values() for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
