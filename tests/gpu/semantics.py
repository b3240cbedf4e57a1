"""Compares how NCCL behaves towards the host with what its simulation claims (shared/wire/simulated_nccl/).

    python -m tests.gpu.semantics stream --ranks 1 --result report.json               # NCCL, one GPU per rank
    python -m tests.gpu.semantics stream --ranks 2 --result report.json --simulate    # the simulation, on the CPU

A probe runs in a process per rank. Some probes are expected to hang, so this program never waits for them forever.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shared.deadlines import scaled
from tests.gpu.results import FAILED, PASSED, Check, Report, as_line

DELAY_S = scaled(0.5)  # by which the GPU, or another rank, is late
STEP_S = scaled(60.0)  # the start of CUDA and NCCL, or a probe that does not hang
HANG_S = scaled(20.0)  # a probe that has done nothing for this long hangs
ABORT_S = scaled(10.0)


# -- one rank


class Probe:
    """One rank of a probe: its device, and a file for what it finds."""

    def __init__(self, rank: int, world_size: int, port: int, folder: Path, simulate: bool, eager: bool):
        self.rank, self.world_size, self.simulate = rank, world_size, simulate
        self._file = (folder / f"rank{rank}").open("a", buffering=1)
        self.device = torch.device("cpu" if simulate else f"cuda:{rank % max(1, torch.cuda.device_count())}")
        if not simulate:
            torch.cuda.set_device(self.device)
        store, self._store = (
            dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2)
        )
        self._delays = 0
        backend, device_id = ("gloo", None) if simulate else ("nccl", self.device if eager else None)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(hours=1),
            device_id=device_id,
        )
        from shared.wire import instrumentation

        self.instrumentation = instrumentation
        instrumentation.install()
        instrumentation.simulate_nccl(simulate)

    def at(self, what: str) -> None:
        """Record what this rank does next, in case it never returns."""
        self._file.write(json.dumps({"at": what}) + "\n")

    def claim(self, name: str, holds: bool, measured: str) -> None:
        self._file.write(json.dumps({"claim": name, "holds": bool(holds), "measured": measured}) + "\n")

    def note(self, text: str) -> None:
        self._file.write(json.dumps({"note": text}) + "\n")

    def tensor(self, elements: int = 1024) -> torch.Tensor:
        return torch.full((elements,), self.rank + 1.0, device=self.device)

    @property
    def total(self) -> float:
        return self.world_size * (self.world_size + 1) / 2

    def delay(self) -> Callable[[], bool]:
        """Delay the GPU. The simulation has no stream, so the last rank is delayed instead.

        Returns a function that tells whether the delay is over.
        """
        if not self.simulate:
            torch.cuda._sleep(int(DELAY_S * self._cycles_per_s))
            passed = torch.cuda.Event()
            passed.record()
            return passed.query
        self._delays += 1
        key = f"delay {self._delays}"
        if not self.is_measured:
            time.sleep(DELAY_S)
            self._store.set(key, "over")
        return lambda: self._store.check([key])

    @property
    def is_measured(self) -> bool:
        """Whether something other than this rank is late."""
        return not self.simulate or self.rank != self.world_size - 1

    def calibrate(self) -> None:
        """Build the communicator, and measure the rate of the GPU's clock, which is slow while the GPU is idle."""
        dist.all_reduce(self.tensor())
        if self.simulate:
            self.instrumentation.synchronize()
            return
        torch.cuda.synchronize()
        cycles, rates = 50_000_000, []
        for _ in range(4):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            torch.cuda._sleep(cycles)
            ended.record()
            ended.synchronize()
            rates.append(cycles / (began.elapsed_time(ended) / 1e3))
        self._cycles_per_s = max(rates)

    def settle(self) -> None:
        """Wait until all ranks have reached this point and all GPUs are idle."""
        self.instrumentation.synchronize()
        dist.barrier()
        if not self.simulate:
            torch.cuda.synchronize()


def stream(probe: Probe) -> None:
    """Test how a collective behaves towards the host while the GPU is delayed."""
    probe.at("the first collective")
    probe.calibrate()
    a_synchronous_collective(probe)
    an_asynchronous_collective(probe)
    two_collectives_on_one_tensor(probe)
    a_barrier(probe)
    if not probe.simulate:
        an_output_read_too_early(probe)


def a_synchronous_collective(probe: Probe) -> None:
    probe.at("a synchronous collective")
    probe.settle()
    x, options = probe.tensor(), dist.AllreduceOptions()
    options.asyncOp = False
    is_over = probe.delay()
    began_s = time.perf_counter()
    work = dist.group.WORLD.allreduce([x], options)  # as dist.all_reduce() calls it, which hides what it returns
    goes_on, took_s = not is_over(), time.perf_counter() - began_s
    if probe.is_measured:
        probe.claim("a synchronous collective lets the host go on", goes_on, f"the call took {ms(took_s)}")
    if probe.simulate:
        probe.note(
            "not compared: the simulation gives a synchronous collective a Work, for which dist.all_reduce() waits"
        )
    else:
        probe.claim("a synchronous collective returns no Work", work is None, f"the Work is {work}")
    value = (x * 1).max().item()
    probe.claim("an operation after it sees the result", value == probe.total, f"{value:g}, expected {probe.total:g}")


def an_asynchronous_collective(probe: Probe) -> None:
    probe.at("an asynchronous collective")
    probe.settle()
    x = probe.tensor()
    is_over = probe.delay()
    began_s = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    is_done, goes_on, took_s = work.is_completed(), not is_over(), time.perf_counter() - began_s
    if probe.is_measured:
        probe.claim("wait() lets the host go on", goes_on, f"call and wait() took {ms(took_s)}")
        probe.claim("after wait(), the operation may be in flight", not is_done, f"is_completed() returned {is_done}")
    value = (x * 1).max().item()
    probe.claim(
        "an operation after wait() sees the result", value == probe.total, f"{value:g}, expected {probe.total:g}"
    )


def two_collectives_on_one_tensor(probe: Probe) -> None:
    probe.at("two collectives on one tensor")
    probe.settle()
    x = probe.tensor()
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(x, async_op=True)
    first.wait()
    second.wait()
    value, expected = (x * 1).max().item(), probe.total * probe.world_size
    probe.claim("two collectives on one tensor run in order", value == expected, f"{value:g}, expected {expected:g}")


def a_barrier(probe: Probe) -> None:
    probe.at("a barrier")
    probe.settle()
    is_over = probe.delay()
    began_s = time.perf_counter()
    dist.barrier()
    blocked, took_s = is_over(), time.perf_counter() - began_s
    if probe.is_measured:
        probe.claim("a barrier blocks the host", blocked, f"it took {ms(took_s)}")


def an_output_read_too_early(probe: Probe, elements: int = 1 << 28, tries: int = 5) -> None:
    """Read the end of a large output before wait(). The values depend on chance, so this claims nothing."""
    from shared.c10d import all_gather_single

    probe.at("an output that is read before wait()")
    probe.settle()
    free_bytes, _ = torch.cuda.mem_get_info()
    elements = min(elements, int(free_bytes / 4 / 4 / probe.world_size))
    shard = torch.ones(elements, device=probe.device)
    output = torch.zeros(elements * probe.world_size, device=probe.device)
    stale = 0
    for _ in range(tries):
        output.zero_()
        torch.cuda.synchronize()
        work = all_gather_single(output, shard, async_op=True)
        early = output[-4:].clone()
        work.wait()
        torch.cuda.synchronize()
        stale += int((early != 1.0).any().item())
    size = f"{output.nbytes / 2**20:.0f} MiB"
    probe.note(f"an output of {size} that was read before wait() held old values in {stale} of {tries} tries")


def alone(probe: Probe) -> None:
    """Let rank 0 call a collective alone, then abort it."""
    probe.at("the first collective")
    probe.calibrate()
    probe.settle()
    if probe.rank != 0:
        time.sleep(1.5 * ABORT_S)  # the connection must stay open
        return
    x = probe.tensor()
    probe.at("a synchronous collective without partners")
    began_s = time.perf_counter()
    dist.all_reduce(x)
    took_s = time.perf_counter() - began_s
    probe.claim("a rank alone in a synchronous collective goes on", True, f"the call took {ms(took_s)}")
    probe.at("the wait for a collective without partners")
    work = dist.all_reduce(probe.tensor(), async_op=True)
    work.wait()
    group = dist.group.WORLD._get_backend(probe.device)
    aborts = threading.Thread(target=group.abort, daemon=True)
    began_s = time.perf_counter()
    aborts.start()
    aborts.join(ABORT_S)
    took_s = time.perf_counter() - began_s
    probe.note(f"abort() took {ms(took_s)}" if not aborts.is_alive() else f"abort() took more than {ABORT_S:g} s")
    probe.at("the synchronization after abort()")
    try:
        torch.cuda.synchronize()
        value = x[0].item()
        probe.claim("after a cut, operations in flight end without an error", True, f"the output held {value:g}")
    except RuntimeError as error:
        probe.claim("after a cut, operations in flight end without an error", False, str(error).splitlines()[0])


def ring(probe: Probe) -> None:
    """Send around a ring without batching: every rank calls isend() before irecv()."""
    probe.at("the first collective")
    probe.calibrate()
    probe.settle()
    received = torch.empty(1024, device=probe.device)
    probe.at("isend()")
    sent = dist.isend(probe.tensor(), (probe.rank + 1) % probe.world_size)
    probe.at("irecv()")
    got = dist.irecv(received, (probe.rank - 1) % probe.world_size)
    probe.at("wait()")
    got.wait()
    sent.wait()
    probe.at("synchronize()")
    torch.cuda.synchronize()
    probe.at("the end")


RING_PLACES = ("isend()", "irecv()", "wait()", "synchronize()", "the end")
PROBES = {"stream": stream, "alone": alone, "ring": ring}


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


# -- all ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--simulate", action="store_true", help="simulate NCCL over gloo, on the CPU")
    parser.add_argument("--eager", action="store_true", help="let NCCL build its communicator at the start")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_a_rank(options)
        return 0
    report = Report(options.result)
    report.begin(options.probe)
    with tempfile.TemporaryDirectory() as made:
        hung = run_ranks(options, Path(made))
        told = [read(Path(made) / f"rank{rank}") for rank in range(options.ranks)]
    judge(report, options, told, hung)
    return 0 if report.passed else 1


def be_a_rank(options) -> None:
    # The course's ranks set these, too (see shared/ranks/rankside.py).
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        os.environ[f"TORCH_NCCL_{name}"] = "0"
    try:
        probe = Probe(options.rank, options.ranks, options.port, options.folder, options.simulate, options.eager)
        PROBES[options.probe](probe)
    except Exception as error:
        traceback.print_exc()
        with (options.folder / f"rank{options.rank}").open("a") as file:
            file.write(json.dumps({"at": f"an error: {as_line(error)}"}) + "\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a communicator that was aborted, or that waits for a rank, may block the end of the process


def run_ranks(options, folder: Path) -> list[int]:
    """Run the probe on all ranks. Returns the ranks that hung."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    flags = [flag for flag, on in (("--simulate", options.simulate), ("--eager", options.eager)) if on]
    command = [sys.executable, "-m", "tests.gpu.semantics", options.probe, "--ranks", str(options.ranks), *flags]
    command += ["--folder", str(folder), "--port", str(store.port)]
    ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(options.ranks)]
    told, deadline_s = 0, time.monotonic() + STEP_S
    while any(process.poll() is None for process in ranks) and time.monotonic() < deadline_s:
        time.sleep(0.1)
        before, told = told, sum(len(read(folder / f"rank{rank}")) for rank in range(options.ranks))
        if told > before:
            started = all(len(read(folder / f"rank{rank}")) > 1 for rank in range(options.ranks))
            deadline_s = time.monotonic() + (HANG_S if started else STEP_S)
    hung = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for rank in hung:
        ranks[rank].kill()
        ranks[rank].wait()
    return hung


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge(report: Report, options, told: list[list[dict]], hung: list[int]) -> None:
    """Report each claim, and where ranks hung."""
    where = {rank: last_place(lines) for rank, lines in enumerate(told)}
    claims: dict[str, list[dict]] = {}
    for line in (line for lines in told for line in lines if "claim" in line):
        claims.setdefault(line["claim"], []).append(line)
    for name, lines in claims.items():
        wrong = [line["measured"] for line in lines if not line["holds"]]
        report.add(Check(name, FAILED if wrong else PASSED, wrong[0] if wrong else ""))
        if not wrong:
            report.note(f"{name}: {lines[0]['measured']}")
    for line in (line for lines in told for line in lines if "note" in line):
        report.note(line["note"])
    places = ", ".join(f"rank {rank} at {where[rank]}" for rank in range(options.ranks))
    if options.probe == "ring":
        report.note(f"{'it hung' if hung else 'it ended'}: {places}")
        reached = all(place in RING_PLACES for place in where.values())
        report.add(Check("the ring was tried", PASSED if reached else FAILED, "" if reached else places))
        if not options.eager:
            name = "an unbatched ring waits in its first send"
            holds = len(hung) == options.ranks and all(place == "isend()" for place in where.values())
            report.add(Check(name, PASSED if holds else FAILED, "" if holds else places))
    elif hung or not claims or any(place.startswith("an error") for place in where.values()):
        report.add(Check("the probe ends", FAILED, places))


def last_place(lines: list[dict]) -> str:
    return next((line["at"] for line in reversed(lines) if "at" in line), "the start")


if __name__ == "__main__":
    sys.exit(main())
