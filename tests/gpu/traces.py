"""Profiles one training step of four strategies on two ranks, and writes a trace of each for ui.perfetto.dev.

    python -m tests.gpu.traces --result report.json --folder build/gpu          # writes build/gpu/traces/NAME.json
    python -m tests.gpu.traces --result report.json --folder DIR --dry          # a tiny model on the CPU over gloo

A trace has both ranks, on one clock. It says on which machine and with which versions it was recorded. Each strategy
has its own deadline, and its trace is written at once, so that a later one that hangs costs only itself.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from shared import ranks
from shared.deadlines import scaled
from shared.ranks.devices import place
from tests.gpu import reduction, tracing
from tests.gpu.results import SKIPPED, Check, Report, as_line
from tests.gpu.starting import try_to_stop

WORLD_SIZE = 2
STRATEGY_S = scaled(60.0)
DEADLINE_S = scaled(180.0)  # of all strategies, after the start of the ranks


@dataclass(frozen=True)
class Recording:
    """A trace to record: a strategy, and its chapter."""

    chapter: str  # also the name of the file
    strategy: str
    title: str


RECORDINGS = (
    Recording("02_manual_ddp", "manual_ddp", "ManualDDP"),
    Recording("04_overlap", "overlapped_ddp", "OverlappedDDP"),
    Recording("07_zero1", "zero1", "ZeRO-1"),
    Recording("09_zero3", "zero3", "ZeRO-3"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="the traces are written to traces/ in this folder")
    parser.add_argument("--dry", action="store_true", help="train a tiny model on the CPU")
    parser.add_argument("--backend", help="as in ranks.start; default: RANKS_BACKEND, or what this machine can do")
    options = parser.parse_args(argv)
    backend = options.backend or os.environ.get("RANKS_BACKEND") or ("gloo:cpu" if options.dry else None)
    report = Report(options.result)
    if reason := "" if options.dry else why_not(backend):
        report.add(Check("traces", SKIPPED, reason))
        return 0
    try:
        with report.check("ranks start"):
            ranks.start(WORLD_SIZE, backend=backend, detect_mismatch=False)
            placement = ranks.current().placement
            if not options.dry and "nccl" not in placement.backend:
                raise RuntimeError(f"the ranks should use NCCL, but got {placement.backend}: {placement.valid}")
        if report.passed:
            record_all(report, options.folder / "traces", options.dry)
    finally:
        try_to_stop(report)
    return 0 if report.passed else 1


def why_not(backend: str | None) -> str:
    """Return why two ranks cannot use NCCL here, or nothing if they can."""
    try:
        placement = place(WORLD_SIZE, backend)
    except ValueError as error:
        return as_line(error)
    devices = ", ".join(placement.devices)
    return "" if "nccl" in placement.backend else f"2 ranks would use {placement.backend} on {devices}, and not NCCL"


def record_all(report: Report, folder: Path, dry: bool) -> None:
    """Record every strategy, and report for each whether this worked."""
    deadline_s = time.monotonic() + DEADLINE_S
    folder.mkdir(parents=True, exist_ok=True)
    training = tracing.DRY if dry else tracing.ON_A_GPU
    for recording in RECORDINGS:
        with report.check(recording.title):
            left_s = min(STRATEGY_S, deadline_s - time.monotonic())
            if left_s <= 0:
                raise TimeoutError(f"the {DEADLINE_S:g} s for all traces were used up")
            report.note(record(recording, training, folder, left_s))


def record(recording: Recording, training: tracing.Training, folder: Path, timeout_s: float) -> str:
    """Record one strategy, and write its trace. Returns a sentence about it.

    Raises:
        RuntimeError: If a GPU was used, and the profiler did not see it. The trace of the host is written anyway.
    """
    recorded = ranks.run(tracing.on_a_rank, recording.strategy, training, timeout_s=timeout_s)
    trace = reduction.as_trace([each.reduced for each in recorded], facts(recording, training, recorded))
    text = reduction.as_text(trace)
    path = folder / f"{recording.chapter}.json"
    path.write_text(text)
    kernels = [each.reduced.kernels for each in recorded]
    if ranks.current().placement.devices[0] != "cpu" and not all(kernels):
        raise RuntimeError(f"the profiler saw {kernels} kernels on the GPU; {path.name} has the host only")
    took_ms = max(each.step_ms for each in recorded)
    return f"{recording.title}: {path.name} has {len(text.encode()) / 1e3:.0f} kB; its step took {took_ms:.1f} ms"


def facts(recording: Recording, training: tracing.Training, recorded: list[tracing.Recorded]) -> dict:
    """Return the metadata of a trace."""
    placement = ranks.current().placement
    devices = len(set(placement.devices))
    shared = placement.devices[0] != "cpu" and devices < len(recorded)
    found = {"title": recording.title, "chapter": recording.chapter} | recorded[0].facts
    found |= {"ranks": len(recorded), "devices": list(placement.devices), "backend": placement.backend}
    found |= {"shared GPU": shared, "model": training.description, "recorded": date.today().isoformat()}
    return found | {"step ms": [round(each.step_ms, 2) for each in recorded], "unit of ts and dur": "microseconds"}


if __name__ == "__main__":
    sys.exit(main())
