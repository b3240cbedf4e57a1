"""Compare the collectives of chapter 01 with torch's own: all-reduce and reduce-scatter, by size.

    python -m benchmarks.collectives            # one table
    python -m benchmarks.collectives --json     # the same as JSON

Ours and torch's take turns within one run, so that a busy moment of the machine affects both. `shared/measure` says
what the time of a collective is. Times are medians over rounds. A ratio is torch's time over ours in the same round,
and the table shows the median over all rounds: above 1, ours is faster.
"""

import argparse
import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.report import machine, started
from shared import measure, ranks
from shared.formulas import all_reduce_sent_bytes
from shared.ranks import rankside
from solutions import collectives

SIZES_KIB = (64, 256, 1024, 4096, 16384, 65536)
ALL_REDUCE_TARGET, ALL_REDUCE_TARGET_FROM_KIB = 0.8, 16384  # as a fraction of torch's bus bandwidth
REDUCE_SCATTER_TARGET, REDUCE_SCATTER_TARGET_FROM_KIB = (
    1.0,
    1024,
)  # of torch's speed; over gloo, its reduce-scatter is an all-reduce
TIMEOUT_S = 300.0


def _all_reduces(tensor: torch.Tensor) -> dict:
    return {"ring": lambda: collectives.ring_all_reduce(tensor), "torch": lambda: dist.all_reduce(tensor)}


def _reduce_scatters(tensor: torch.Tensor) -> dict:
    shard = tensor.new_empty(tensor.numel() // dist.get_world_size())
    torch_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return {
        "ring": lambda: collectives.ring_reduce_scatter(tensor),
        "direct": lambda: collectives.direct_reduce_scatter(tensor),
        "torch": lambda: torch_reduce_scatter(shard, tensor),
    }


FAMILIES = {"all-reduce": _all_reduces, "reduce-scatter": _reduce_scatters}


def times_on_a_rank(family: str, size_bytes: int, rounds: int) -> measure.Measured:
    """Time every implementation in a family once per round, in turn. Runs on every rank."""
    return measure.jobs(FAMILIES[family](torch.zeros(size_bytes // 4, device=rankside.here.device)), rounds=rounds)


@dataclass(frozen=True)
class Cell:
    """One family at one size."""

    family: str
    size_kib: int
    measured: measure.Measured

    def median_ms(self, name: str) -> float:
        return self.measured[name].time_ms

    def ratio(self, name: str = "ring") -> float:
        return self.measured.ratio("torch", name)

    def bus_gb_per_s(self, name: str, world_size: int) -> float:
        return all_reduce_sent_bytes(1024 * self.size_kib, world_size) / self.median_ms(name) / 1e6

    @property
    def met(self) -> bool:
        if self.family == "all-reduce":
            return self.size_kib < ALL_REDUCE_TARGET_FROM_KIB or self.ratio() >= ALL_REDUCE_TARGET
        return self.size_kib < REDUCE_SCATTER_TARGET_FROM_KIB or self.ratio() > REDUCE_SCATTER_TARGET


def compare(world_size: int, rounds: int) -> dict[int, list[Cell]]:
    """Measure all families and sizes. Returns one cell per family, by size in KiB."""
    from benchmarks.collectives import (
        times_on_a_rank,
    )  # a function of __main__ would be sent to the ranks without this file's names

    cells: dict[int, list[Cell]] = {}
    with started(world_size):
        for size_kib in SIZES_KIB:
            for family in FAMILIES:
                of_ranks = ranks.run(times_on_a_rank, family, 1024 * size_kib, rounds, timeout_s=TIMEOUT_S)
                cells.setdefault(size_kib, []).append(Cell(family, size_kib, of_ranks[0]))
    return cells


def as_table(cells: dict[int, list[Cell]], world_size: int) -> str:
    lines = [
        ["", "all-reduce", "ring", "torch", "ring", "torch", "ring ratio", "reduce-scatter", "ring", "direct",
         "torch", "ring ratio", "direct ratio", "met"],
        ["KiB", "", "ms", "ms", "GB/s", "GB/s", "×", "", "ms", "ms", "ms", "×", "×", ""],
    ]  # fmt: skip
    for size_kib, (reduced, scattered) in cells.items():
        values = [reduced.median_ms("ring"), reduced.median_ms("torch")]
        values += [reduced.bus_gb_per_s(name, world_size) for name in ("ring", "torch")]
        first = [f"{value:.2f}" for value in [*values, reduced.ratio()]]
        values = [scattered.median_ms(name) for name in ("ring", "direct", "torch")]
        second = [f"{value:.2f}" for value in [*values, scattered.ratio(), scattered.ratio("direct")]]
        lines.append([str(size_kib), "", *first, "", *second, "yes" if reduced.met and scattered.met else "NO"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)).rstrip() for line in lines)


def as_json(machine_info: dict, cells: dict[int, list[Cell]]) -> str:
    as_dicts = [
        {
            "family": cell.family,
            "size_kib": cell.size_kib,
            "median_ms": cell.measured.ms(),
            "ratio": {name: cell.ratio(name) for name in cell.measured.times if name != "torch"},
            "met": cell.met,
        }
        for size_cells in cells.values()
        for cell in size_cells
    ]
    return json.dumps({"machine": machine_info, "cells": as_dicts}, indent=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the collectives of chapter 01 with torch's own.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="number of ranks (default: 4)")
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds per size (default: 30)")
    options = parser.parse_args()
    machine_info = machine() | {"ranks": options.world_size}
    cells = compare(options.world_size, options.rounds)
    if options.json:
        print(as_json(machine_info, cells))
    else:
        print("  ".join(f"{name} {value}" for name, value in machine_info.items()))
        print(as_table(cells, options.world_size))
    return 0 if all(cell.met for size_cells in cells.values() for cell in size_cells) else 1


if __name__ == "__main__":
    sys.exit(main())
