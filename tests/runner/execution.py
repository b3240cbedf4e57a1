"""Run a phase's commands, show how far they are, and end what hangs."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from shared.deadlines import scaled
from tests import mutation_results
from tests.runner.phases import ROOT, TEST_S, Phase
from tests.runner.progress import Progress
from tests.runner.results import Results

POLL_S = 0.5
# No test is longer without an event than its deadline. This is for what has none: the start and the end of pytest.
SILENCE_S = 3 * TEST_S
TRACEBACKS_BEGIN = "===="  # pytest's first heading; the lines before it are dots


@dataclass
class Result:
    """What became of a phase; problem is None if it passed."""

    name: str
    seconds: float
    problem: str | None
    tests: Results = field(default_factory=Results)
    mutants: dict[str, mutation_results.Report] = field(default_factory=dict)  # by chapter
    is_pytest: bool = True

    @property
    def counts(self) -> Counter[str]:
        """How many tests passed, failed and were skipped.

        A phase that failed without a failed test counts as one failure: the sum must not read "0 failed".
        """
        counts = self.tests.counts
        if self.is_pytest and self.problem:
            counts["failed"] = max(1, counts["failed"])
        return counts


def run_phase(phase: Phase, root: Path = ROOT, usual_s: dict[str, float] | None = None) -> Result:
    """Run a phase's commands, all of them even after one that failed.

    Args:
        usual_s: test → how long it takes, for the estimate of what is left.
    """
    print(f"\n── {phase.name} ──", flush=True)
    began_s = time.monotonic()
    results = Results()
    problem = missing_notebooks(phase, root)
    if problem is None:
        run = PytestRun(phase, root, results, usual_s or {}) if phase.is_pytest else None
        problems = [run(command) if run else run_command(command, root) for command in phase.commands]
        problem = next(filter(None, problems), None)
    mutants = mutation_results.read(results) if phase.mutants_of else {}
    if phase.is_pytest:
        problem = judge(results, problem)
    if phase.mutants_of:
        problem = problem or judge_mutants(mutants, phase.mutants_of)
    return Result(phase.name, time.monotonic() - began_s, problem, results, mutants, phase.is_pytest)


def missing_notebooks(phase: Phase, root: Path) -> str | None:
    """Say so when a phase about notebooks finds none."""
    found = [path for name in phase.notebooks for path in [root / name, *(root / name).glob("*.ipynb")]]
    if phase.notebooks and not any(path.suffix == ".ipynb" and path.exists() for path in found):
        return f"there is no notebook in {' or '.join(phase.notebooks)}"
    return None


def judge(results: Results, problem: str | None) -> str | None:
    """Say why a pytest phase failed, whatever its exit code claims."""
    counts = results.counts
    ran = counts["passed"] + counts["failed"]
    if counts["failed"]:
        return f"{counts['failed']} of {ran} tests failed"
    return problem or (None if ran else "no test ran")


def judge_mutants(mutants: dict[str, mutation_results.Report], chapters: tuple[str, ...]) -> str | None:
    """Say so when a mutant was not caught, a variant did not pass, or one was not tried."""
    problems = mutation_results.problems(mutants, chapters)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"mutants and variants: {problems[0]}{more}" if problems else None


# --- one command ------------------------------------------------------------------------------------


class PytestRun:
    """Runs a pytest command, listens to what its plugin tells, and shows how far it is."""

    def __init__(self, phase: Phase, root: Path, results: Results, usual_s: dict[str, float]):
        self._phase, self._root, self._results = phase, root, results
        self._progress = Progress(phase.name, results, usual_s, phase.workers)
        self._rest = ""  # of an event that was not yet written to its end

    def __call__(self, command: tuple[str, ...]) -> str | None:
        """Run the command. Returns the problem, or None."""
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            (folder / "events").touch()
            command += ("--events", str(folder / "events"))
            if self._phase.only:
                (folder / "only").write_text("\n".join(self._phase.only))
                command += ("--only", str(folder / "only"))
            problem = "stopped"
            with (folder / "events").open() as events, (folder / "output").open("w+") as output:
                try:
                    problem = run_command(command, self._root, lambda: self._listen(events), output)
                finally:
                    self._listen(events)
                    self._progress.close()
                    if problem:
                        output.seek(0)
                        print(tracebacks(output.read()), flush=True)
        return problem

    def _listen(self, events) -> bool:
        """Take in what was told since the last time, and show it. Returns whether anything was told."""
        *lines, self._rest = (self._rest + events.read()).split("\n")
        for line in lines:
            self._results.take(line)
        self._progress.show()
        return bool(lines)


def tracebacks(output: str) -> str:
    """Return what pytest printed, without the dots at the beginning where there is more than those."""
    before, heading, after = output.partition(TRACEBACKS_BEGIN)
    return (heading + after if heading else before).rstrip()


def run_command(
    command: tuple[str, ...], root: Path, has_told: Callable[[], bool] | None = None, output=None
) -> str | None:
    """Run a command in a process group of its own, and kill it when it stays silent for too long.

    Args:
        has_told: called now and then; returns whether there was a sign of life since the last call. Without it the
            command may be silent for as long as it wants.
        output: the file for what the command prints; by default that goes to the terminal.

    Returns:
        The problem, or None.
    """
    # nbgrader starts alembic by name, a cell torchrun: they must be this environment's.
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    errors = subprocess.STDOUT if output else None
    options = {"cwd": root, "env": {**os.environ, "PATH": path}, "start_new_session": True}
    process = subprocess.Popen(command, stdout=output, stderr=errors, **options)
    silence_s, heard_s = scaled(SILENCE_S), time.monotonic()
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            if has_told is None or has_told():
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > silence_s:
                return f"killed after {silence_s:g} s without a sign of life"
        return f"exit code {process.returncode}" if process.returncode else None
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
