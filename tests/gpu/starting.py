"""Starts ranks, runs cells on them, lets one hang, and stops them.

python -m tests.gpu.starting --ranks 2 --backend nccl --device cuda --result report.json
"""

import argparse
import contextlib
import io
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from shared import ranks
from shared.deadlines import scaled
from shared.ranks import magic
from shared.ranks.diagnosis import name_ranks
from tests.gpu.results import Report

ENDING_S = scaled(20.0)
HANG_S = scaled(60.0)

ADD = """x = torch.full((4,), rank + 1.0, device=device)
dist.all_reduce(x)
total = x[0].item()
print(total)"""
FAIL = """if rank == 0:
    raise ValueError("on purpose")"""
HANG = """if rank == 0:
    dist.all_reduce(torch.ones(4, device=device))"""
SEND = """received = torch.zeros(4, device=device)
if rank == 0:
    dist.send(torch.full((4,), 7.0, device=device), 1)
if rank == 1:
    dist.recv(received, 0)
    print(received.sum().item())"""
TIME = """import time

def wait():
    if device.type == "cuda":
        torch.cuda.synchronize()

def seconds(megabytes, rounds=10):
    x = torch.zeros(megabytes << 18, device=device)
    for _ in range(3):
        dist.all_reduce(x)
    wait()
    began_s = time.perf_counter()
    for _ in range(rounds):
        dist.all_reduce(x)
    wait()
    return (time.perf_counter() - began_s) / rounds

took_s = seconds({megabytes})"""
MEGABYTES = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "nccl:shared", "gloo", "gloo:cpu"))
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True, help="where the ranks must run")
    parser.add_argument("--simulate", action="store_true", help="simulate NCCL over gloo")
    options = parser.parse_args()
    report = Report(options.result)
    try:
        began_s = time.monotonic()
        with report.check("ranks start"):
            simulate = "nccl" if options.simulate else None
            ranks.start(options.ranks, backend=options.backend, detect_mismatch=False, simulate=simulate)
        if report.passed:
            report.note(f"{options.ranks} ranks started in {time.monotonic() - began_s:.1f} s")
            report.note(ranks.current().placement.valid)
            with report.check(f"their device is {options.device}"):
                expect(cell("print(device.type)"), f"{name_ranks(range(options.ranks))} │ {options.device}\n")
            try_cells(report, options.ranks, can_send=(options.backend, options.device) != ("gloo", "cuda"))
            if not options.simulate:
                measure(report, options.ranks)
    finally:
        try_to_stop(report)
    return 0 if report.passed else 1


def try_cells(report: Report, world_size: int, can_send: bool) -> None:
    """Run cells that print, send, fail and hang."""
    total = world_size * (world_size + 1) / 2
    everyone = name_ranks(range(world_size))
    with report.check("an all-reduce adds, and its output comes back"):
        began_s = time.monotonic()
        expect(cell(ADD), f"{everyone} │ {total}\n")
        report.note(f"the first all-reduce took {time.monotonic() - began_s:.2f} s")
    with report.check("variables stay on their ranks"):
        expect(ranks.pull("total"), [total] * world_size)
    with report.check("an error names its rank and its message"), fails("Rank 0", "on purpose"):
        cell(FAIL)
    with report.check("the next cell works"):
        expect(cell(ADD), f"{everyone} │ {total}\n")
    if world_size > 1:
        if can_send:
            with report.check("a send reaches its receiver"):
                expect(cell(SEND), "rank 1 │ 28.0\n")
        else:
            with report.check("a send from a GPU over gloo is rejected"), fails("gloo cannot send"):
                cell(SEND)
        with report.check("a hang is stopped, and its collective is named"), fails("all_reduce"):
            cell(HANG, timeout_s=HANG_S)
        with report.check("the next cell works after a hang"):
            expect(cell(ADD), f"{everyone} │ {total}\n")


def measure(report: Report, world_size: int) -> None:
    """Measure an empty cell and an all-reduce."""
    with report.check("an all-reduce of 64 MiB can be timed"):
        times_s = []
        for _ in range(5):
            began_s = time.monotonic()
            cell("")
            times_s.append(time.monotonic() - began_s)
        report.note(f"an empty cell took {1e3 * min(times_s):.0f} ms")
        cell(TIME.replace("{megabytes}", str(MEGABYTES)))
        took_s = max(ranks.pull("took_s"))
        bus_gb_per_s = 2 * (world_size - 1) / world_size * MEGABYTES * 2**20 / took_s / 1e9
        bandwidth = f", a bus bandwidth of {bus_gb_per_s:.1f} GB/s" if world_size > 1 else ""
        report.note(f"an all-reduce of {MEGABYTES} MiB took {1e3 * took_s:.2f} ms{bandwidth}")


def try_to_stop(report: Report) -> None:
    with report.check("a stop leaves no process"):
        started = psutil.Process().children(recursive=True)
        ranks.stop()
        _, left = psutil.wait_procs(started, timeout=ENDING_S)
        left = [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        if left:
            raise AssertionError(f"{len(left)} of {len(started)} processes are left, such as {left[0]}")


def cell(source: str, timeout_s: float | None = None) -> str:
    """Run a cell on all ranks. Returns what the notebook would show."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        magic.cell("" if timeout_s is None else f"--timeout {timeout_s:g}", source)
    return printed.getvalue()


def expect(got, wanted) -> None:
    if got != wanted:
        raise AssertionError(f"expected {wanted!r}, got {got!r}")


@contextlib.contextmanager
def fails(*texts: str) -> Iterator[None]:
    """Expect that a cell fails, and that these texts are in its message."""
    try:
        yield
    except ranks.CellFailed as failure:
        missing = [text for text in texts if text not in str(failure)]
        if missing:
            raise AssertionError(f"{' and '.join(missing)} should be in: {failure}") from None
    else:
        raise AssertionError("the cell should have failed")


if __name__ == "__main__":
    sys.exit(main())
