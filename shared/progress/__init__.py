"""A student's progress: which exercises have passed their checks in this folder's labs. Nobody is graded by it.

    from shared import progress

    progress.show()    # what has passed, lab by lab, and what comes next

A check that somebody runs in JupyterLab, in a notebook of labs/, adds a line to progress.jsonl. Programs that execute
notebooks, solutions and files at a terminal add none. The file is plain text that anybody can edit: it is NEVER
trusted for grading, where every check runs anew. Delete it to begin anew.

Lines are only added, each by one write that appends. So two notebooks at once lose nothing of each other's, and a line
that was cut short spoils no other.

An exercise is passed when all its checks passed in one run. It stays passed: a kernel that was restarted, or a better
version half written, takes nothing away from what was understood. But a newest run that failed is told beside it.
"""

import errno
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from shared.progress.page import Page
from shared.progress.standings import Run
from shared.ranks import magic

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "progress.jsonl"
NOTE = {
    "note": "What your checks found, for the start page. Never used for grading: a grader runs every check anew. "
    "Delete this file to begin anew."
}
MOST_BYTES = 50_000_000  # a record grows by 200 bytes a run


def show() -> None:
    """Show what has passed and what comes next; a program that executes the notebook gets the page of a newcomer.

    So what is built, and what a test compares, is the same in every folder.
    """
    in_notebook = hasattr(get_ipython(), "kernel")
    found, problem = runs() if magic.in_jupyterlab() or not in_notebook else ([], "")
    page = Page(ROOT, found, problem)
    if in_notebook:
        display({"text/plain": page.as_text(), "text/html": page.as_html()}, raw=True)
    else:
        print(page.as_text())


def in_a_lab() -> bool:
    """True where somebody runs this cell in JupyterLab, in a notebook of labs/."""
    notebook = Path(os.environ.get("JPY_SESSION_NAME", ""))  # Jupyter's server names a kernel's first notebook
    return magic.in_jupyterlab() and notebook.resolve().parent == ROOT / "labs"


def record(exercise, verdicts: list) -> None:
    """Keep what the checks of an exercise found, if this is a lab. Where that fails, say so; raise nothing."""
    name = _name_of(exercise)
    if not name or not verdicts or not in_a_lab():
        return
    passed, failed = (tuple(each.check for each in verdicts if each.passed == wanted) for wanted in (True, False))
    try:
        _append(Run(datetime.now().astimezone().isoformat(timespec="seconds"), name, passed, failed))
    except OSError as error:
        print(f"This run is not in your progress: {FILE.name} cannot be written ({error.strerror}).")


def _name_of(exercise) -> str:
    """→ what a lab calls it by, "first_collectives.pass_right", or nothing for one that is not the course's"""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("shared.checks."):
            for name, value in list(vars(module).items()):
                if value is exercise:
                    return f"{module_name.rpartition('.')[2]}.{name}"
    return ""


def _append(run: Run) -> None:
    lines = [json.dumps(asdict(run))] if FILE.exists() else [json.dumps(NOTE), json.dumps(asdict(run))]
    # A line's end comes before it: what another notebook has just written, or a line that was cut short, stays apart.
    text = "".join(f"\n{line}" for line in lines).encode()
    with open(FILE, "ab", buffering=0) as file:
        if file.write(text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def runs() -> tuple[list[Run], str]:
    """Read the record. → its runs, the oldest first; a sentence on what cannot be read, or nothing"""
    try:
        if not FILE.exists():
            return [], ""
        if FILE.stat().st_size > MOST_BYTES:
            return [], f"{FILE.name} is no record of this course: move it away."
        lines = FILE.read_bytes().splitlines()
    except OSError as error:
        return [], f"{FILE.name} cannot be read ({error.strerror})."
    read = [_run_of(line) for line in lines if line.strip() and not line.startswith(b'{"note"')]
    found = [run for run in read if run is not None]
    odd = len(read) - len(found)
    return found, f"Lines of {FILE.name} that cannot be read, and count for nothing: {odd}." if odd else ""


def _run_of(line: bytes) -> Run | None:
    try:
        fields = json.loads(line)
        run = Run(fields["at"], fields["exercise"], tuple(fields["passed"]), tuple(fields["failed"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = (run.at, run.exercise, *run.passed, *run.failed)
    return run if all(isinstance(text, str) for text in texts) and run.passed + run.failed else None
