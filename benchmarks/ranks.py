"""Measure how long a student waits: for ranks to start, for cells to run, and for recovery from a failure.

    python -m benchmarks.ranks            # one table
    python -m benchmarks.ranks --json     # the same as JSON

Each start is measured in a new Python process. For comparison, torchrun starts the same number of processes, which
form a process group.
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

# The script that students would run in a course without `%%ranks` cells.
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
    """Start ranks in a new process.

    Returns:
        The seconds from before the import, and the seconds of ranks.start alone.
    """
    done = subprocess.run(
        [sys.executable, "-c", START_RANKS],
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=True,
        encoding="utf-8",
        errors="replace",
    )
    whole_s, start_s = json.loads(done.stdout)
    return whole_s, start_s


def torchrun_ready_s() -> float:
    """Start the same number of processes with torchrun. Returns the seconds until all pass their first barrier."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "join.py")
        script.write_text(JOIN_WITH_TORCHRUN, encoding="utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
        began_s = time.time()
        done = subprocess.run(
            [*launcher, str(script)],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=True,
            encoding="utf-8",
            errors="replace",
        )
    return float(done.stdout.split("ready")[1]) - began_s


def starts(repetitions: int) -> list[Row]:
    """Measure both ways to start in turn, so that a busy moment of the machine affects both."""
    our_starts, torchrun_s = [], []
    for _ in range(repetitions):
        our_starts.append(ranks_ready_s())
        torchrun_s.append(torchrun_ready_s())
    whole_s = [start[0] for start in our_starts]
    ratios = [theirs / ours for theirs, ours in zip(torchrun_s, whole_s, strict=True)]
    return [
        Row(f"{WORLD_SIZE} ranks ready, including the import", "s", whole_s, target=3.0),
        Row("  of that, ranks.start", "s", [start[1] for start in our_starts]),
        Row(f"torchrun, {WORLD_SIZE} processes ready", "s", torchrun_s),
        Row("torchrun / ranks", "×", ratios),
    ]


def times_s(call: Callable[[], object], repetitions: int) -> list[float]:
    times = []
    for _ in range(repetitions):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return times


def nothing() -> None:
    pass


def overheads(repetitions: int) -> list[Row]:
    """Measure cells and calls that do nothing."""
    cell_s = times_s(lambda: magic.cell("", "pass"), repetitions)
    call_s = times_s(lambda: ranks.run(nothing), repetitions)
    return [
        Row("empty %%ranks cell", "ms", [1e3 * seconds for seconds in cell_s], target=30.0),
        Row("ranks.run of an empty function", "ms", [1e3 * seconds for seconds in call_s]),
    ]


def fail_and_recover(source: str, line: str = "") -> None:
    """Run a cell that fails, and then one that needs every rank."""
    try:
        magic.cell(line, source)
    except ranks.CellFailed:
        magic.cell("", "dist.barrier()")
    else:
        raise AssertionError(f"This cell should have failed, but it did not:\n{source}")


def recovery(repetitions: int) -> list[Row]:
    """Measure the time from a failing cell to the end of the next one."""
    hang_s = times_s(lambda: fail_and_recover(HANG, f"--timeout {HANG_DEADLINE_S}"), repetitions)
    raise_s = times_s(lambda: fail_and_recover(RAISE), repetitions)
    die_s = times_s(lambda: fail_and_recover(DIE), repetitions)
    beyond_s = [seconds - HANG_DEADLINE_S for seconds in hang_s]
    return [
        Row("hang: from the deadline to the end of the next cell", "s", beyond_s, target=1.0),
        Row("exception on one rank: to the end of the next cell", "s", raise_s),
        Row("death of one rank: to the end of the next cell", "s", die_s),
    ]


def measure(start_repetitions: int, cell_repetitions: int, failure_repetitions: int) -> list[Row]:
    rows = starts(start_repetitions)
    ranks.start(WORLD_SIZE)
    try:
        rows += overheads(cell_repetitions)
        rows += recovery(failure_repetitions)
    finally:
        ranks.stop()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure the start of the ranks, empty cells, and recovery from failures."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--starts", type=int, default=5, metavar="N", help="starts of each kind (default: 5)")
    parser.add_argument("--cells", type=int, default=50, metavar="N", help="number of empty cells (default: 50)")
    parser.add_argument("--failures", type=int, default=3, metavar="N", help="failures of each kind (default: 3)")
    options = parser.parse_args()
    machine_info = machine()
    with contextlib.redirect_stdout(io.StringIO()):
        rows = measure(options.starts, options.cells, options.failures)
    return show(machine_info, rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
