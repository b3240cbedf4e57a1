"""A student's progress: the exercises that have passed their checks in the labs of this folder. It is not a grade.

    from shared import progress

    progress.show()    # which exercises have passed, lab by lab, and which one is next
    progress.finish()  # a page to keep, with everything that has passed: mine/finished.html

A check that somebody runs in a notebook of labs/ adds a line to progress.jsonl. Checks that a program runs, checks in
solutions, and checks of files in a terminal add none. The file is plain text that anybody can edit, so it is NEVER
trusted for grading, which runs every check again. Delete the file to start over.

Lines are only appended, each with a single write. So two notebooks that run at the same time do not lose each other's
lines, and a truncated line does not damage the others.

An exercise has passed when all its checks have passed in one run, and it stays passed: restarting the kernel, or
working on a better version, does not take it back. If the newest run failed, the page also says so.
"""

import contextlib
import errno
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from shared.progress import keepsake
from shared.progress.page import After, Page, Run
from shared.ranks import reader

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "progress.jsonl"
NOTE = {
    "note": "The results of your checks, for the start page. They are never used for grading, which runs every check "
    "again. Delete this file to start over."
}
MAX_BYTES = 50_000_000  # each run adds about 200 bytes


def show() -> None:
    """Show which exercises have passed and which one is next.

    A program that executes the notebook gets the page of a new student, so that a built notebook, and what a test
    compares with it, is the same in every folder.
    """
    in_notebook = hasattr(get_ipython(), "kernel")
    recorded, problem = runs() if reader.present() or not in_notebook else ([], "")
    page = Page(ROOT, recorded, problem)
    if in_notebook:
        display({"text/plain": page.as_text(), "text/html": page.as_html()}, raw=True)
    else:
        print(page.as_text())


def finish() -> None:
    """Write a page with everything that has passed, which needs no course to be read, and say where it is."""
    if keepsake.write_finished(ROOT, Page(ROOT, runs()[0])):
        print(f"{keepsake.FINISHED} shows what you have built. It is one file: open it in a browser, keep it, show it.")
    else:
        print("There is nothing to show yet: no exercise has passed its checks in a lab of this folder.")


def write_bars() -> None:
    """Write the bars that START_HERE.md shows."""
    with contextlib.suppress(OSError):  # Where they cannot be written, START_HERE.md has none.
        keepsake.write_bars(ROOT, Page(ROOT, runs()[0]))


def in_a_lab() -> bool:
    """True if somebody runs this cell in a notebook of labs/."""
    return reader.present() and reader.folder() == ROOT / "labs"


def record(exercise, verdicts: list) -> None:
    """Record the verdicts of an exercise's checks if this is a lab. If that fails, print a message and continue."""
    name = name_of(exercise)
    if not name or not verdicts or not in_a_lab():
        return
    passed = tuple(verdict.check for verdict in verdicts if verdict.passed)
    failed = tuple(verdict.check for verdict in verdicts if not verdict.passed)
    _record(Run(_now(), name, passed, failed))


def record_look(exercise) -> None:
    """Record that somebody has looked at our version of an exercise, if this is a lab."""
    if in_a_lab():
        _record(Run(_now(), name_of(exercise), (), (), saw_ours=True))


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _record(run: Run) -> None:
    try:
        _append(run)
        if run.all_passed:
            write_bars()
    except OSError as error:
        print(f"This run was not added to your progress, because {FILE.name} cannot be written ({error.strerror}).")


def after(exercise) -> After | None:
    """Return the points of an exercise's lab and what comes next, or None outside a lab."""
    return Page(ROOT, runs()[0]).after(name_of(exercise)) if in_a_lab() else None


def failures_in_a_row(exercise) -> int:
    """Return how often an exercise has failed since it last passed, or 0 outside a lab."""
    name = name_of(exercise)
    runs_of_it = [run for run in runs()[0] if run.exercise == name and not run.saw_ours] if in_a_lab() else []
    outcomes = [run.all_passed for run in runs_of_it]
    return outcomes[::-1].index(True) if True in outcomes else len(outcomes)


def name_of(exercise) -> str:
    """Return the name that a lab uses, such as "first_collectives.pass_right", or "" if it is not the course's."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("shared.checks."):
            for name, value in list(vars(module).items()):
                if value is exercise:
                    return f"{module_name.rpartition('.')[2]}.{name}"
    return ""


def _append(run: Run) -> None:
    lines = [json.dumps(asdict(run))] if FILE.exists() else [json.dumps(NOTE), json.dumps(asdict(run))]
    # Each line begins with the line break, so it stays separate from a line that another notebook has just written, and
    # from a truncated one.
    text = "".join(f"\n{line}" for line in lines).encode()
    with open(FILE, "ab", buffering=0) as file:
        if file.write(text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def runs() -> tuple[list[Run], str]:
    """Read the record. Returns its runs, the oldest first, and a sentence about what cannot be read, or ""."""
    try:
        if not FILE.exists():
            return [], ""
        if FILE.stat().st_size > MAX_BYTES:
            return [], f"{FILE.name} is too large to be a record of your progress. Move or delete it."
        lines = FILE.read_bytes().splitlines()
    except OSError as error:
        return [], f"{FILE.name} cannot be read ({error.strerror})."
    read = [_run_of(line) for line in lines if line.strip() and not line.startswith(b'{"note"')]
    found = [run for run in read if run is not None]
    unreadable = len(read) - len(found)
    lines_text = "1 line" if unreadable == 1 else f"{unreadable} lines"
    return found, f"{FILE.name} has {lines_text} that cannot be read. This page uses the others." if unreadable else ""


def _run_of(line: bytes) -> Run | None:
    try:
        fields = json.loads(line)
        checks = tuple(fields["passed"]), tuple(fields["failed"])
        run = Run(fields["at"], fields["exercise"], *checks, fields.get("saw_ours", False) is True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = (run.at, run.exercise, *run.passed, *run.failed)
    return run if all(isinstance(text, str) for text in texts) and (run.passed + run.failed or run.saw_ours) else None
