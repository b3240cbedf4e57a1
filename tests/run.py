"""Run the course's checks: lint, unit tests, notebooks.

    python -m tests.run                          lint, unit tests and all lessons
    python -m tests.run --all                    also all solutions and tests that are marked `exhaustive`, as in CI
    python -m tests.run lint unit                only some of the phases
    python -m tests.run --chapter 08             lint, and the tests, mutants, variants and notebooks of a chapter
    python -m tests.run --quick                  no slow tests, two notebooks
    python -m tests.run --last-failed            the tests that failed the last time

All phases run, even after one has failed. If at most three tests of a phase have failed, they run again at the end,
alone: one unlucky test among thousands must not cost a whole run. A notebook counts as one test, because its other
cells fail if the first one does. The summary names those that pass then. A phase has no time limit, but each test has a
deadline. On a busy machine, all deadlines are longer. The last line is the total, `N passed, N failed`. The exit code
is 0 if every phase passed.
The implementation is in tests/runner/.
"""

import argparse
import os
import signal
import sys
from dataclasses import replace

from tests import mutation_results
from tests.runner import calibration
from tests.runner.execution import Result, run_phase, settle
from tests.runner.phases import BUILDERS, ROOT, Selection
from tests.runner.record import Record
from tests.runner.summary import summary

MOST_AGAIN = 3


class Usage(ValueError):
    """An argument names something that does not exist."""


def chosen_phases(names: list[str]) -> list[str]:
    """Return the named phases in their fixed order, or all phases if none is named."""
    if unknown := sorted(set(names) - set(BUILDERS)):
        raise Usage(f"There is no phase {', '.join(unknown)}. The phases are {', '.join(BUILDERS)}.")
    return [name for name in BUILDERS if name in names or not names]


def chosen_chapter(argument: str) -> str:
    """Return the full name of a chapter from its number or its name: 09_zero3 for 9, 09, zero3 or 09_zero3."""
    known = mutation_results.chapter_names()
    for name in known:
        number, title = name.split("_", 1)
        if argument in (name, title, number, number.lstrip("0") or "0"):
            return name
    raise Usage(f"There is no chapter {argument}. The chapters are {', '.join(known)}.")


def main(argv: list[str] | None = None) -> int:
    """Run the chosen phases and print the summary. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Run the course's checks.")
    parser.add_argument("phases", nargs="*", metavar="phase", help=f"any of {', '.join(BUILDERS)}; default: all")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--all", action="store_true", help="everything, as in CI")
    some.add_argument("--chapter", help="only the tests of this chapter, such as 08")
    some.add_argument("--quick", action="store_true", help="no slow tests, two notebooks")
    some.add_argument("--last-failed", action="store_true", help="only the tests that failed the last time")
    options = parser.parse_args(argv)
    try:
        names = chosen_phases(options.phases)
        chapter = chosen_chapter(options.chapter) if options.chapter else ""
    except Usage as error:
        print(error, file=sys.stderr)
        return 2
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # It would let each of hundreds of processes compile the course.
    record = Record.load()
    if options.last_failed:
        names = [name for name in names if name in record.failed]
        if not names:
            print("Nothing failed the last time.")
    failed = dict(record.failed) if options.last_failed else None
    selection = Selection(chapter, options.quick, options.all, failed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a canceled CI job leaves no processes behind
    try:
        results = [run(name, selection, record) for name in names]
        results = [run_again(result, selection, record) for result in results]
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) else 0


def run_again(result: Result, selection: Selection, record: Record) -> Result:
    """Run the failed tests of a phase again, alone, if they are few. Returns the phase's result after that."""
    failed = [test.name for test in result.tests.failed]
    counted = dict.fromkeys(name.split("::Cell")[0] for name in failed)
    if selection.failed is not None or not 0 < len(counted) <= MOST_AGAIN:
        return result
    print(f"\nAgain, alone: {', '.join(counted)}")
    again = run(result.name, replace(selection, failed={result.name: failed}, alone=True), record)
    return settle(result, again, BUILDERS[result.name](selection))


def run(name: str, selection: Selection, record: Record) -> Result:
    """Run one phase with deadlines that fit the machine's load, and record its results."""
    scale = calibration.calibrate()
    if scale > 1.2 * calibration.MARGIN:
        print(f"\nThis machine is slow or busy, so every deadline is {scale:g} times as long as usual.")
    result = run_phase(BUILDERS[name](selection), ROOT, record.seconds)
    whole = selection.exhaustive or selection.failed is not None
    record.note(name, result.tests, failed=result.problem is not None, whole=whole)
    record.save()
    return result


if __name__ == "__main__":
    sys.exit(main())
