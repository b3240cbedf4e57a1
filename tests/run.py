"""Run the course's checks: lint, unit tests, notebooks.

    python -m tests.run                          everything, as in CI
    python -m tests.run lint unit                some of the phases
    python -m tests.run --chapter 08             what belongs to a chapter: its tests, mutants, variants and notebooks
    python -m tests.run --quick                  no slow tests, two notebooks
    python -m tests.run --last-failed            what failed the last time

Every phase runs, even after one that failed. There is no limit on a phase: each test has a deadline, and all deadlines
grow with how busy the machine is. The last line sums up the tests, `N passed, N failed`; the exit code is 0 if every
phase passed. tests/runner/ holds the parts.
"""

import argparse
import os
import signal
import sys

from tests import mutation_results
from tests.runner import calibration
from tests.runner.execution import Result, run_phase
from tests.runner.phases import BUILDERS, ROOT, Selection
from tests.runner.record import Record
from tests.runner.summary import summary


class Usage(ValueError):
    """What was asked for does not exist."""


def chosen_phases(names: list[str]) -> list[str]:
    """Return the named phases in their fixed order; all of them for no name."""
    if unknown := sorted(set(names) - set(BUILDERS)):
        raise Usage(f"There is no phase {', '.join(unknown)}. The phases are {', '.join(BUILDERS)}.")
    return [name for name in BUILDERS if name in names or not names]


def chosen_chapter(asked_for: str) -> str:
    """Return the full name of a chapter from its number or its name: 09_zero3 for 9, 09, zero3 or 09_zero3."""
    known = mutation_results.chapter_names()
    for name in known:
        number, title = name.split("_", 1)
        if asked_for in (name, title, number, number.lstrip("0") or "0"):
            return name
    raise Usage(f"There is no chapter {asked_for}. The chapters are {', '.join(known)}.")


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for and print the summary. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="Run the course's checks.")
    parser.add_argument("phases", nargs="*", metavar="phase", help=f"any of {', '.join(BUILDERS)}; default: all")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--chapter", help="only what belongs to this chapter: 08, say")
    some.add_argument("--quick", action="store_true", help="no slow tests, two notebooks")
    some.add_argument("--last-failed", action="store_true", help="only what failed the last time")
    options = parser.parse_args(argv)
    try:
        names = chosen_phases(options.phases)
        chapter = chosen_chapter(options.chapter) if options.chapter else ""
    except Usage as error:
        print(error, file=sys.stderr)
        return 2
    os.chdir(ROOT)
    record = Record.load()
    if options.last_failed:
        names = [name for name in names if name in record.failed]
        if not names:
            print("Nothing failed the last time.")
    selection = Selection(chapter, options.quick, dict(record.failed) if options.last_failed else None)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a cancelled CI job leaves nothing behind
    try:
        results = [run(name, selection, record) for name in names]
    except KeyboardInterrupt:
        print("\nStopped.")
        return 130
    print("\n" + summary(results), flush=True)
    return 1 if any(result.problem for result in results) else 0


def run(name: str, selection: Selection, record: Record) -> Result:
    """Run one phase with deadlines for the machine as it is now, and remember what became of it."""
    scale = calibration.calibrate()
    if scale > 1.2:
        print(f"\nThis machine is slow or busy: every deadline is {scale:g} times as long as usual.")
    result = run_phase(BUILDERS[name](selection), ROOT, record.seconds)
    whole = not (selection.chapter or selection.quick)
    record.note(name, result.tests, failed=result.problem is not None, whole=whole)
    record.save()
    return result


if __name__ == "__main__":
    sys.exit(main())
