"""Measure what a student waits for: ranks that start, cells that run, hangs that heal.

    python -m benchmarks.ranks            # one table
    python -m benchmarks.ranks --json     # the same, for programs

Starts are measured in fresh Python processes, beside torchrun's for the same thing: four processes, one group.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, machine, show
from shared import ranks
from shared.ranks import magic

WORLD_SIZE = 4
START_TIMEOUT_S = 120
HANG_DEADLINE_S = 2.0

START_RANKS = f"""
import contextlib, io, json, time
began_s = time.perf_counter()
from shared import ranks
imported_s = time.perf_counter()
with contextlib.redirect_stdout(io.StringIO()):
    ranks.start({WORLD_SIZE})
ready_s = time.perf_counter()
print(json.dumps([ready_s - began_s, ready_s - imported_s]))
"""

# What a course without ranks in cells would tell its students to run.
JOIN_WITH_TORCHRUN = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    print("ready", time.time())
dist.destroy_process_group()
"""

HANG = "if rank == 1:\n    while True: pass\ndist.barrier()"
RAISE = "if rank == 1:\n    raise ValueError('on purpose')\ndist.barrier()"
DIE = "if rank == 1:\n    import os; os._exit(1)\ndist.barrier()"


def ranks_ready_s() -> tuple[float, float]:
    """Start ranks in a fresh process. → seconds since before the import, seconds of ranks.start alone"""
    ran = subprocess.run(
        [sys.executable, "-c", START_RANKS], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True
    )
    whole_s, start_s = json.loads(ran.stdout)
    return whole_s, start_s


def torchrun_ready_s() -> float:
    """Start as many processes with torchrun. → seconds until their first barrier is passed"""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "join.py")
        script.write_text(JOIN_WITH_TORCHRUN)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
        began_s = time.time()
        ran = subprocess.run(
            [*launcher, str(script)], capture_output=True, text=True, timeout=START_TIMEOUT_S, check=True
        )
    return float(ran.stdout.split("ready")[1]) - began_s


def starts(repetitions: int) -> list[Row]:
    """Measure both ways to start, in turns, so that a busy moment of the machine meets both."""
    ours, theirs = [], []
    for _ in range(repetitions):
        ours.append(ranks_ready_s())
        theirs.append(torchrun_ready_s())
    whole = [whole_s for whole_s, _ in ours]
    ratios = [torchrun_s / whole_s for torchrun_s, whole_s in zip(theirs, whole, strict=True)]
    return [
        Row(f"{WORLD_SIZE} ranks ready, from the import on", "s", whole, aim=3.0),
        Row("  of that, ranks.start", "s", [start_s for _, start_s in ours]),
        Row(f"torchrun, {WORLD_SIZE} processes ready", "s", theirs),
        Row("torchrun / ranks", "×", ratios),
    ]


def times_s(body: Callable[[], object], repetitions: int) -> list[float]:
    found = []
    for _ in range(repetitions):
        began_s = time.perf_counter()
        body()
        found.append(time.perf_counter() - began_s)
    return found


def nothing() -> None:
    pass


def overheads(repetitions: int) -> list[Row]:
    """Measure cells and calls that do nothing."""
    cell_s = times_s(lambda: magic.cell("", "pass"), repetitions)
    call_s = times_s(lambda: ranks.run(nothing), repetitions)
    return [
        Row("empty %%ranks cell", "ms", [1e3 * seconds for seconds in cell_s], aim=30.0),
        Row("ranks.run of an empty function", "ms", [1e3 * seconds for seconds in call_s]),
    ]


def fail_and_go_on(source: str, line: str = "") -> None:
    """Run a cell that fails, then one that needs every rank."""
    try:
        magic.cell(line, source)
    except ranks.CellFailed:
        magic.cell("", "dist.barrier()")
    else:
        raise AssertionError(f"this cell was to fail:\n{source}")


def healing(repetitions: int) -> list[Row]:
    """Measure from a failing cell to the end of the next one."""
    hang_s = times_s(lambda: fail_and_go_on(HANG, f"--timeout {HANG_DEADLINE_S}"), repetitions)
    raise_s = times_s(lambda: fail_and_go_on(RAISE), repetitions)
    die_s = times_s(lambda: fail_and_go_on(DIE), repetitions)
    beyond_s = [seconds - HANG_DEADLINE_S for seconds in hang_s]
    return [
        Row("hang: from the deadline to the next cell", "s", beyond_s, aim=1.0),
        Row("exception on one rank: to the next cell", "s", raise_s),
        Row("death of one rank: to the next cell", "s", die_s),
    ]


def measure(start_repetitions: int, cell_repetitions: int, heal_repetitions: int) -> list[Row]:
    rows = starts(start_repetitions)
    ranks.start(WORLD_SIZE)
    try:
        rows += overheads(cell_repetitions)
        rows += healing(heal_repetitions)
    finally:
        ranks.stop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure starts, cells and healing of the ranks.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--starts", type=int, default=5, metavar="N", help="starts of each kind (5)")
    parser.add_argument("--cells", type=int, default=50, metavar="N", help="empty cells (50)")
    parser.add_argument("--heals", type=int, default=3, metavar="N", help="failures of each kind (3)")
    options = parser.parse_args()
    found_on = machine()
    with contextlib.redirect_stdout(io.StringIO()):
        rows = measure(options.starts, options.cells, options.heals)
    return show(found_on, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
