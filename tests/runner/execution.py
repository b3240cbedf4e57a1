"""Run a phase's commands, show their progress, and kill commands that hang."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from shared.deadlines import scaled
from tests import mutation_results
from tests.runner.phases import ROOT, TEST_S, Phase
from tests.runner.progress import Progress
from tests.runner.results import Results

POLL_S = 0.5
# Every test reports an event by its deadline. This limit is for the start and the end of pytest.
SILENCE_S = 3 * TEST_S
MAKE_VARIABLES = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PHASES", "ALL", "CHAPTER", "LAST_FAILED")
TRACEBACKS_BEGIN = "===="  # pytest's first heading; before it, there are only dots


@dataclass
class Result:
    """The result of a phase; `problem` is None if it passed."""

    name: str
    seconds: float
    problem: str | None
    tests: Results = field(default_factory=Results)
    mutants: dict[str, mutation_results.Report] = field(default_factory=dict)  # by chapter
    is_pytest: bool = True

    @property
    def counts(self) -> Counter[str]:
        """Return how many tests passed, failed and were skipped.

        A phase that failed without a failed test counts as one failure, so that the total is not "0 failed".
        """
        counts = self.tests.counts
        if self.is_pytest and self.problem:
            counts["failed"] = max(1, counts["failed"])
        return counts


def run_phase(phase: Phase, root: Path = ROOT, usual_s: dict[str, float] | None = None) -> Result:
    """Run all of a phase's commands, even after one has failed.

    Args:
        usual_s: How long each test usually takes, to estimate the remaining time.
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


def settle(result: Result, again: Result, phase: Phase) -> Result:
    """Return the result of a phase after its failed tests ran again, alone."""
    result.tests.settle(again.tests)
    if again.problem:
        return result
    mutants = mutation_results.read(result.tests) if phase.mutants_of else {}
    problem = judge(result.tests, None) or (judge_mutants(mutants, phase.mutants_of) if phase.mutants_of else None)
    return replace(result, seconds=result.seconds + again.seconds, problem=problem, mutants=mutants)


def missing_notebooks(phase: Phase, root: Path) -> str | None:
    """Return the problem if a phase that runs notebooks finds none."""
    found = [path for name in phase.notebooks for path in [root / name, *(root / name).glob("*.ipynb")]]
    if phase.notebooks and not any(path.suffix == ".ipynb" and path.exists() for path in found):
        return f"there is no notebook in {' or '.join(phase.notebooks)}"
    return None


def judge(results: Results, problem: str | None) -> str | None:
    """Return why a pytest phase failed, regardless of its exit code, or None."""
    counts = results.counts
    ran = counts["passed"] + counts["failed"]
    if counts["failed"]:
        return f"{counts['failed']} of {ran} tests failed"
    return problem or (None if ran else "no test ran")


def judge_mutants(mutants: dict[str, mutation_results.Report], chapters: tuple[str, ...]) -> str | None:
    """Return the problem if a mutant was not caught, a variant did not pass, or one of them was not tried."""
    problems = mutation_results.problems(mutants, chapters)
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"mutants and variants: {problems[0]}{more}" if problems else None


# --- one command ------------------------------------------------------------------------------------


class PytestRun:
    """Runs a pytest command, reads its plugin's reports, and shows the progress."""

    def __init__(self, phase: Phase, root: Path, results: Results, usual_s: dict[str, float]):
        self._phase, self._root, self._results = phase, root, results
        self._progress = Progress(phase.name, results, usual_s, phase.workers)
        self._rest = ""  # the beginning of an event that is not complete yet

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
        """Process the events since the last call, and show the progress. Returns whether there were any."""
        *lines, self._rest = (self._rest + events.read()).split("\n")
        for line in lines:
            self._results.take(line)
        self._progress.show()
        return bool(lines)


def tracebacks(output: str) -> str:
    """Return pytest's output without the dots at the beginning, unless there is nothing else."""
    before, heading, after = output.partition(TRACEBACKS_BEGIN)
    return (heading + after if heading else before).rstrip()


def run_command(
    command: tuple[str, ...], root: Path, has_reported: Callable[[], bool] | None = None, output=None
) -> str | None:
    """Run a command in its own process group, and kill it if it is silent for too long.

    Args:
        has_reported: A function that is called regularly, and returns whether the command has reported anything since
            the last call. Without it, the command may be silent for any length of time.
        output: The file for the command's output; by default, the output goes to the terminal.

    Returns:
        The problem, or None.
    """
    # nbgrader and some cells start programs by name (alembic, torchrun). These must be found in this environment.
    path = os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ.get("PATH", "")])
    errors = subprocess.STDOUT if output else None
    environment = {**os.environ, "PATH": path}
    for variable in MAKE_VARIABLES:  # Tests that call `make` must not inherit the arguments of this `make test`.
        environment.pop(variable, None)
    options = {"cwd": root, "env": environment, "start_new_session": True}
    process = subprocess.Popen(command, stdout=output, stderr=errors, **options)
    silence_s, heard_s = scaled(SILENCE_S), time.monotonic()
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            if has_reported is None or has_reported():
                heard_s = time.monotonic()
            elif time.monotonic() - heard_s > silence_s:
                return f"killed because it reported nothing for {silence_s:g} s"
        return f"exit code {process.returncode}" if process.returncode else None
    finally:
        if process.returncode is None:
            kill_tree(process)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process's group and all its descendants. A kernel, for example, has its own session."""
    descendants = []
    with contextlib.suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for descendant in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.wait()
