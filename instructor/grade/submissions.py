"""Open a submitted notebook, and extract its exercises.

The exercise cells of a notebook count, identified by their grade_id, and what they use from other cells (assembly.py).
The given code and the checks come from the instructor's source, and other files beside the notebook are not read.

Nothing here reads a notebook or runs a student's code. The reader and the judge do that inside the sandbox.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from instructor.build import Chapter
from instructor.grade.reader import Unreadable, without_first_magics

MOST_NAMES = 5  # of files in one sentence
ANONYMOUS = "anonymous "  # how a folder's name begins if the platform hides the student's number
TIMESTAMP, ARRIVAL = "timestamp.txt", "arrival.json"
NOT_HANDED_IN = (TIMESTAMP, ARRIVAL, ".ipynb_checkpoints")
MOST_BYTES = 20_000_000  # Only a notebook with endless output is larger.


@dataclass(frozen=True)
class Submission:
    """One student's notebook for one lab. The path is None if nothing was handed in, except perhaps for other files."""

    student: str
    lab: str
    path: Path | None
    instead: tuple[str, ...] = ()  # the names of these files
    choice: str = ""  # which of several notebooks this is, and why the others are not graded


def other_files(submission: Submission) -> list[str]:
    """Return the files beside the notebook. They are not used, and the student should know that.

    The choice among several notebooks names the others.
    """
    if submission.path is None:
        return []
    beside = [path for path in submission.path.parent.iterdir() if path.name not in NOT_HANDED_IN]
    return sorted(path.name for path in beside if path.suffix.lower() != ".ipynb" or path.is_dir())


def opened(submission: Submission) -> int:
    """Open a submitted notebook, and return its file descriptor. `reader.py` reads it.

    Raises:
        Unreadable: if there is no notebook, or it is not the student's own regular file.
    """
    if submission.path is None:
        shown = ", ".join(submission.instead[:MOST_NAMES]) + (", …" if len(submission.instead) > MOST_NAMES else "")
        raise Unreadable(f"there is no notebook for {submission.lab}" + (f", only {shown}" if shown else ""))
    if not _is_own_file(submission.path, submission.student):
        raise Unreadable("the notebook is a link or not a regular file; hand in the notebook itself")
    try:
        file = os.open(submission.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Unreadable(f"the notebook cannot be opened: {error.strerror}") from None
    size = os.fstat(file)
    if not stat.S_ISREG(size.st_mode) or size.st_size > MOST_BYTES:
        os.close(file)
        raise Unreadable(f"the notebook is larger than {MOST_BYTES // 1_000_000} MB; clear its outputs")
    return file


def _is_own_file(path: Path, student: str) -> bool:
    """Return False for a link, which may lead to another student's work, and for a pipe, which may never end."""
    folder = next(parent for parent in path.parents if parent.name == student)
    folders = [path, *path.parents]
    inside = folders[: folders.index(folder)]
    return path.is_file() and not any(each.is_symlink() for each in inside)


def pieces_of(cells: list[dict], chapter: Chapter, ours: dict[str, str] | None = None) -> list[dict]:
    """Return the cells of the lab's module: given cells as the instructor wrote them, exercises as the student did.

    Each piece is {"cell": the name of its cell in the lab, or None, "grade_id": the same, but None for the instructor's
    code, "source": its code, "line": the number of the cell's line with which the code begins}. They are in the lab's
    order. A missing exercise is left out.

    Args:
        cells: The notebook's code cells, as `reader.code_cells_in` returns them.
        ours: Our own code for some exercises, by name. It replaces the student's.

    Raises:
        Unreadable: if the notebook is not one of this lab.
    """
    theirs, ours = _exercises_in(cells), ours or {}
    lab = chapter.read("lab")
    exercises = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    expected = [cell.metadata["nbgrader"]["grade_id"] for cell in exercises]
    if not set(expected) & set(theirs):
        raise Unreadable(f"the notebook has none of this lab's exercises, which are {', '.join(expected)}")
    pieces = []
    for cell in lab.cells:
        if {"export", "exercise", "given"} & set(cell.metadata.get("tags", [])):
            name = cell.metadata.get("nbgrader", {}).get("grade_id", "")
            by_student = name != "" and name not in ours
            source = theirs.get(name, "") if by_student else ours.get(name, without_first_magics(cell.source))
            code = source.strip()
            line = 1 + source[: source.find(code)].count("\n")
            pieces.append(
                {"cell": name or None, "grade_id": name if by_student else None, "source": code, "line": line}
            )
    return [piece for piece in pieces if piece["source"]]


def _exercises_in(cells: list[dict]) -> dict[str, str]:
    """Return the student's code for each exercise, by name. The order of the cells does not matter.

    An editor that splits or copies a cell also copies its grade_id. Such cells are joined, from top to bottom.
    """
    found: dict[str, list[str]] = {}
    for cell in cells:
        if cell["name"]:
            found.setdefault(cell["name"], []).append(cell["source"].rstrip())
    return {name: "\n\n".join(dict.fromkeys(sources)) for name, sources in found.items()}


def other_cells(cells: list[dict]) -> list[dict]:
    """Return the cells of the ranks that are not exercises. They may define what an exercise uses, or be its answer.

    Each is {"source": its code, "before": the name of the exercise that follows it, or None after the last one}.
    """
    found, following = [], None
    for cell in reversed(cells):
        following = cell["name"] or following
        if not cell["name"] and cell["on_ranks"]:
            found.append({"source": cell["source"], "before": following})
    return found[::-1]


def repeated_exercises(cells: list[dict]) -> list[str]:
    """Return the exercises that are in more than one cell. The student should know that."""
    names = [cell["name"] for cell in cells if cell["name"]]
    return sorted({name for name in names if names.count(name) > 1})
