"""Run one module's checks on a file, on fresh ranks: python -m shared.checks NAME FILE.

The exit status is 0 if all checks pass, 1 if some fail, and 2 if the file cannot be checked.
"""

import argparse
import ast
import contextlib
import importlib
import io
import json
import pkgutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shared import checks, ranks
from shared.checks.engine import candidate, display, failures, framework
from shared.checks.engine.attempts import PROBE_TIMEOUT_S, Runner
from shared.checks.engine.verdicts import Verdict, as_json
from shared.checks.terminal import show_anything

POLL_S = 0.3


def available() -> list[str]:
    """List the modules that have checks."""
    modules = [info.name for info in pkgutil.iter_modules(checks.__path__) if info.ispkg]
    return [name for name in modules if any(exercises_of(name))]


def exercises_of(name: str) -> list[framework.Exercise]:
    """Return the exercises of a check module, in order of definition."""
    module = importlib.import_module(f"shared.checks.{name}")
    return [value for value in vars(module).values() if isinstance(value, framework.Exercise)]


def run_file(
    name: str,
    path: str,
    seed: int | None = None,
    only: str = "",
    check: str = "",
    runner: Runner | None = None,
) -> list[Verdict]:
    """Check a student's file on the ranks that are running.

    Args:
        name: The name of the check module.
        path: The file.
        seed: Repeats the random choices of an earlier run.
        only: The name of the only class or function ("piece") to check; "" checks all of them.
        check: The name of the only check to run; "" runs all of them.
        runner: Makes the attempts; see `framework.run_exercise`.

    Raises:
        failures.Unusable: If the file does not load, or defines none of the pieces. Pieces that it lacks, or imports
            from solutions/, are skipped.
    """
    path = str(Path(path).resolve())
    earlier = getattr(importlib.import_module(f"shared.checks.{name}"), "EARLIER_PIECES", {})
    with _with_our_pieces(path, earlier) as path:
        return _run_loaded(name, path, seed, only, check, runner)


def _run_loaded(name: str, path: str, seed, only: str, check: str, runner: Runner | None) -> list[Verdict]:
    try:
        defined, _ = ranks.run(candidate.load, path, timeout_s=PROBE_TIMEOUT_S)[0]
    except ranks.CellFailed as failure:
        report = "\n".join(filter(None, [str(failure), failures.hint_on_names(str(failure))]))
        raise failures.Unusable(f"{Path(path).name} does not load.\n{report}") from None
    is_ours = candidate.is_a_solution(path)  # Our own solutions consist of several modules, which import each other.
    verdicts, judged = [], False
    for exercise in exercises_of(name):
        if only and exercise.piece != only:
            continue
        imported = defined.get(exercise.piece, "").split(".")[0] == candidate.SOLUTIONS and not is_ours
        if imported and not only:
            print(f"– {exercise.piece} is imported from solutions, so it is not checked")
            continue
        if {exercise.piece, exercise.fallback_name} & set(defined):
            verdicts += framework.run_exercise(exercise, path, seed, check, runner=runner)
            judged = True
        else:
            print(f"– {exercise.piece} is not in {Path(path).name}, so it is not checked")
    if not judged:
        pieces = ", ".join(exercise.piece for exercise in exercises_of(name) if exercise.piece == only or not only)
        raise failures.Unusable(f"{Path(path).name} defines none of: {pieces}")
    return verdicts


@contextlib.contextmanager
def _with_our_pieces(path: str, earlier: dict[str, str]) -> Iterator[str]:
    """Give the path of a file in which our pieces of earlier labs replace its own.

    Such a piece stands for `from shared.mine import …`, which gives our piece in grading, too: an earlier lab may allow
    what this lab cannot build on. All other lines keep their numbers.

    Args:
        path: The student's file.
        earlier: The names of the pieces, each with its module in solutions/.
    """
    try:
        source = Path(path).read_text(encoding="utf-8") if earlier else ""
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        statements = []  # Loading the file reports it.
    own = [each for each in statements if isinstance(each, ast.ClassDef) and each.name in earlier]
    if not own:
        yield path
        return
    lines = source.split("\n")
    for each in own:
        print(f"– {each.name} is a piece of an earlier lab, so ours is used")
        ours = f"from {candidate.SOLUTIONS}.{earlier[each.name]} import {each.name}"
        last = each.end_lineno or each.lineno
        lines[each.lineno - 1 : last] = [ours, *[""] * (last - each.lineno)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, Path(path).name)
        copy.write_text("\n".join(lines), encoding="utf-8")
        yield str(copy)


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(prog="python -m shared.checks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("name", help="the module's name in solutions/, such as manual_ddp")
    parser.add_argument("file", help="a Python file that defines your class or function")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    parser.add_argument("--watch", action="store_true", help="check the file each time you save it, until Ctrl+C")
    options = parser.parse_args()
    problem = None
    if options.name not in available():
        problem = f"there are no checks for {options.name!r}; there are for: {', '.join(available())}"
    elif not Path(options.file).is_file():
        problem = f"there is no file {options.file}"
    elif Path(options.file).suffix == ".ipynb":
        problem = f"{options.file} is a notebook: run its cells, whose checks are at the end of each exercise"
    if problem:
        return _report(options, [], problem, 0.0)
    try:
        return _watch(options) if options.watch else _check(options)
    finally:
        ranks.stop()


def _check(options) -> int:
    """Check the file and report. Returns the exit status. The ranks stay."""
    began = time.monotonic()
    verdicts, problem = [], None
    try:
        with contextlib.redirect_stdout(io.StringIO() if options.json else sys.stderr):
            _start_ranks()
            verdicts = run_file(options.name, options.file, options.seed)
    except ranks.RanksError as error:
        problem = str(error)
    return _report(options, verdicts, problem, time.monotonic() - began)


def _start_ranks() -> None:
    """Start the ranks, or keep those that are running. Only the first time, a table shows them."""
    with contextlib.redirect_stdout(io.StringIO() if _ranks_run() else sys.stdout):
        ranks.start(world_size=max(framework.WORLD_SIZES), detect_mismatch=False)


def _ranks_run() -> bool:
    try:
        ranks.current()
    except ranks.RanksError:
        return False
    return True


def _watch(options) -> int:
    """Check the file now and whenever it has new contents, until Ctrl+C. Returns the last exit status.

    Some editors save a file in several steps, or without a change. So the contents count, once they stay the same.
    """
    checked, before, status = None, b"", 2
    try:
        while True:
            with contextlib.suppress(FileNotFoundError):  # Some editors remove the file for a moment.
                contents = Path(options.file).read_bytes()
                if contents != checked and (contents == before or checked is None):
                    checked, status = contents, _check(options)
                    print(f"Waiting until you save {options.file}. Ctrl+C ends this.", flush=True)
                before = contents
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return status


def _report(options, verdicts: list[Verdict], problem: str | None, seconds: float) -> int:
    status = 2 if problem else 0 if all(verdict.passed for verdict in verdicts) else 1
    if options.json:
        report = {"name": options.name, "file": options.file, "status": status, "unusable": problem}
        print(json.dumps(report | {"verdicts": as_json(verdicts), "seconds": round(seconds, 2)}))
    elif problem:
        print(f"unusable: {problem}")
    else:
        print(display.as_text(verdicts))
        passed = sum(verdict.passed for verdict in verdicts)
        print(f"{passed} of {len(verdicts)} checks passed in {seconds:.1f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
