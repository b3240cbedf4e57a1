"""Run the course's checks, phase by phase: `python -m tests.run [lint] [unit] [notebooks]`.

Every phase runs, even after one that failed. A phase that hangs is ended with all that it started. The unit
phase must also have caught every wrong solution of tests/mutants/ and passed every right one. The last line
sums up the pytest phases: `N passed, N failed`. The exit code is 0 if every phase passed.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import mutation_results

PROFILED_FILES = 8  # of each phase: the summary says how long the workers spent in them
ROOT = Path(__file__).resolve().parent.parent
PYTEST = (sys.executable, "-m", "pytest")
RUFF = (sys.executable, "-m", "ruff")
SPELLING = (sys.executable, "-m", "tests.spelling")
BY_FILE = ("--dist", "loadfile")  # tests share ranks (conftest.py spreads some), a notebook's cells a kernel
IN_ORDER = "--no-loadscope-reorder"  # else the files with the most tests, not the longest ones, would come first

# nbval marks the cells after one that timed out as expected to fail: one that passes all the same is a failure.
STRICT = ("-p", "no:cacheprovider", "-o", "xfail_strict=true")


@dataclass(frozen=True)
class Phase:
    """One kind of check: commands that must all exit 0 before the deadline."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    deadline_s: float
    is_pytest: bool = False
    notebooks_in: tuple[str, ...] = ()  # there must be some, or the phase would prove nothing
    tries_mutants: bool = False  # all must be caught


PHASES = (
    Phase("lint", ((*RUFF, "check", "."), (*RUFF, "format", "--check", "."), SPELLING), deadline_s=120),
    Phase(
        "unit",
        # Three workers for two cores: tests wait for ranks. Notebooks measure, and have the cores to themselves.
        # After 5 minutes in one test, pytest prints where each thread is: the deadline's kill cannot.
        ((*PYTEST, "tests", "-n", "3", *BY_FILE, IN_ORDER, "-m", "not gpu", "-o", "faulthandler_timeout=300"),),
        deadline_s=20 * 60,
        is_pytest=True,
        tries_mutants=True,
    ),
    Phase(
        "notebooks",
        ((*PYTEST, "--nbval", "--nbval-cell-timeout=120", "solutions", "chapters", "-n", "2", *BY_FILE, *STRICT),),
        deadline_s=15 * 60,
        is_pytest=True,
        notebooks_in=("solutions", "chapters"),
    ),
)


@dataclass
class Tally:
    """How many tests of a phase passed, failed and were skipped, and where the time of its workers went."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds_in: Counter[str] = field(default_factory=Counter)  # by file, the longest first

    def __str__(self):
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.passed} passed, {self.failed} failed{skipped}"


@dataclass
class Result:
    """What became of a phase; problem is None if it passed."""

    name: str
    seconds: float
    problem: str | None
    tally: Tally
    mutants: dict[str, mutation_results.Report] = field(default_factory=dict)  # by chapter


# --- one phase --------------------------------------------------------------------------------------


def run_phase(phase: Phase, root: Path = ROOT) -> Result:
    """Run a phase's commands and read what its tests reported."""
    print(f"\n── {phase.name} ──", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        problem = missing_notebooks(phase, root) or run_commands(phase, root, report)
        tally = read_report(report)
        mutants = mutation_results.read(report) if phase.tries_mutants else {}
    if phase.is_pytest:
        problem = judge(tally, problem)
        if phase.tries_mutants:
            problem = problem or judge_mutants(mutants)
        # A killed or empty phase names no failed test: the last line must not read "0 failed".
        tally.failed = max(tally.failed, 1 if problem else 0)
    return Result(phase.name, time.monotonic() - started, problem, tally, mutants)


def missing_notebooks(phase: Phase, root: Path) -> str | None:
    """Say so when a phase about notebooks finds none."""
    if phase.notebooks_in and not any(True for folder in phase.notebooks_in for _ in (root / folder).glob("*.ipynb")):
        return f"no .ipynb in {' or '.join(phase.notebooks_in)}"
    return None


def run_commands(phase: Phase, root: Path, report: Path) -> str | None:
    """Run all commands of a phase under its deadline. → the first problem"""
    deadline = time.monotonic() + phase.deadline_s
    problems = []
    for command in phase.commands:
        if phase.is_pytest:
            command = (*command, f"--junitxml={report}")
        code = run_command(command, root, deadline)
        if code is None:
            return f"killed after {phase.deadline_s:g} s"
        if code:
            problems.append(f"exit code {code}")
    return problems[0] if problems else None


def run_command(command: tuple[str, ...], root: Path, deadline: float) -> int | None:
    """Run a command in a process group of its own. → its exit code; None if it was killed at the deadline"""
    # nbgrader starts alembic by name, a cell torchrun: they must be this environment's.
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    process = subprocess.Popen(command, cwd=root, env={**os.environ, "PATH": path}, start_new_session=True)
    try:
        return process.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process's group and all that descends from it: a kernel is in a session of its own."""
    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()


def read_report(report: Path) -> Tally:
    """Count a junit report's test cases."""
    tally = Tally()
    try:
        cases = ElementTree.parse(report).iter("testcase")
    except (OSError, ElementTree.ParseError):  # pytest never came to write it, or was killed while it did
        return tally
    for case in cases:
        tally.seconds_in[case.get("classname", "")] += float(case.get("time", 0))
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            tally.failed += 1
        elif "skipped" in kinds:
            tally.skipped += 1
        else:
            tally.passed += 1
    return tally


def judge(tally: Tally, problem: str | None) -> str | None:
    """Say why a pytest phase failed, whatever its exit code claims."""
    ran = tally.passed + tally.failed
    if tally.failed:
        return f"{tally.failed} of {ran} tests failed"
    if problem is None and ran == 0:
        return "no test ran"
    return problem


def judge_mutants(mutants: dict[str, mutation_results.Report]) -> str | None:
    """Say so when a wrong solution was not caught, a right one did not pass, or one was not tried."""
    problems = mutation_results.problems(mutants)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"wrong and right solutions: {problems[0]}{more}" if problems else None


# --- all of them ------------------------------------------------------------------------------------


def summary(results: list[Result]) -> str:
    """Write the table of phases, that of the mutants and, last, the sum of their tests."""
    lines = [f"{'phase':<10} {'seconds':>8}  result"]
    total = Tally()
    for result in results:
        verdict = f"failed: {result.problem}" if result.problem else "passed"
        lines.append(f"{result.name:<10} {result.seconds:>8.1f}  {verdict}")
        total.passed += result.tally.passed
        total.failed += result.tally.failed
        total.skipped += result.tally.skipped
        longest = result.tally.seconds_in.most_common(PROFILED_FILES)
        lines += [f"{'':<10} {seconds:>8.1f}  {name}" for name, seconds in longest]
    for result in results:
        if result.mutants:
            lines += ["", str(mutation_results.by_chapter(result.mutants)), ""]
    return "\n".join([*lines, str(total)])


def chosen_phases(names: list[str]) -> list[Phase]:
    """Return the named phases in their fixed order; all of them for no name."""
    return [phase for phase in PHASES if phase.name in names or not names]


def main(argv: list[str] | None = None) -> int:
    """Run the chosen phases and print the summary. → exit code"""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Run the course's checks.")
    known = [phase.name for phase in PHASES]
    parser.add_argument("phases", nargs="*", metavar="phase", help=f"any of {', '.join(known)}; default: all")
    names = parser.parse_args(argv).phases
    if unknown := set(names) - set(known):
        parser.error(f"no phase {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a cancelled CI job leaves nothing behind
    try:
        results = [run_phase(phase) for phase in chosen_phases(names)]
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
