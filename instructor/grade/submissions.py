"""Find submitted notebooks, `<folder>/<student>/<lab>/<notebook>.ipynb` as in nbgrader, and extract their exercises.

Only the exercise cells of a notebook count, identified by their grade_id. The given code and the checks come from the
instructor's source, and other files beside the notebook are not read.

Nothing here runs or compiles a student's code. The judge does that inside its sandbox.
"""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat

from instructor.build import Chapter, chapters

MAGICS = re.compile(r"\A(\s*%%(ranks|time|capture)\b[^\n]*)+")  # first lines that say how to run a cell
MOST_BYTES = 20_000_000  # Only a notebook with endless output is larger.
MOST_CELLS = 2000  # Reading 200,000 cells takes most of a minute, outside any sandbox.


class Unreadable(ValueError):
    """A submission cannot be graded; the message says why in one sentence."""


@dataclass(frozen=True)
class Submission:
    """One student's notebook for one lab. The path is None if nothing was handed in."""

    student: str
    lab: str
    path: Path | None


def find(folder: Path, lab: str) -> list[Submission]:
    """List every student's submission for a lab, sorted by name. Each folder is a student."""
    return [Submission(student.name, lab, _notebook(student, lab)) for student in students_in(folder)]


def students_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def labs_in(folder: Path) -> list[Chapter]:
    """List the labs for which anybody handed in something."""
    return [
        chapter
        for chapter in chapters()
        if any((student / chapter.name).is_dir() or _notebook(student, chapter.name) for student in students_in(folder))
    ]


def _notebook(student: Path, lab: str) -> Path | None:
    """Find a student's notebook: the one with the lab's name, else "<lab> (1)", else one without a lab's name."""
    others = {chapter.name for chapter in chapters()} - {lab}
    for folder in (student / lab, student):
        notebooks = [path for path in sorted(folder.glob("*.ipynb")) if path.stem not in others]
        named = [path for path in notebooks if path.stem == lab]
        named += [path for path in notebooks if path.stem.startswith(lab) and path.stem != lab]
        named += notebooks if folder != student else []
        if named:
            return named[0]
    return None


def other_files(submission: Submission) -> list[str]:
    """Return the files beside the notebook. They are not used, and the student should know that."""
    if submission.path is None:
        return []
    expected = {submission.path.name, "timestamp.txt", ".ipynb_checkpoints"}
    return sorted(path.name for path in submission.path.parent.iterdir() if path.name not in expected)


def pieces_of(submission: Submission, chapter: Chapter) -> list[dict]:
    """Return the cells of the lab's module: given cells as the instructor wrote them, exercises as the student did.

    Each cell is {"grade_id": the exercise's name, or None for a given cell, "source": its code}. They are in the lab's
    order. A missing exercise is left out.

    Raises:
        Unreadable: if the file is not a notebook, or not one of this lab.
    """
    theirs = exercises_in(read(submission))
    lab = chapter.read("lab")
    exercises = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    expected = [cell.metadata["nbgrader"]["grade_id"] for cell in exercises]
    if not set(expected) & set(theirs):
        raise Unreadable(f"the notebook has none of this lab's exercises, which are {', '.join(expected)}")
    cells = []
    for cell in lab.cells:
        if {"export", "exercise", "given"} & set(cell.metadata.get("tags", [])):
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            source = cell.source if name is None else theirs.get(name, "")
            cells.append({"grade_id": name, "source": MAGICS.sub("", source).strip()})
    return [cell for cell in cells if cell["source"]]


def other_cells(submission: Submission) -> list[str]:
    """Return the code cells that are not exercises. They are not graded, but may define what an exercise lacks."""
    cells = [cell for cell in read(submission).cells if cell.cell_type == "code" and not _exercise_name(cell)]
    return [MAGICS.sub("", cell.source) for cell in cells]


def read(submission: Submission) -> nbformat.NotebookNode:
    """Read a submitted notebook without its outputs.

    Raises:
        Unreadable: if there is no notebook, or the file is not a valid one.
    """
    if submission.path is None:
        raise Unreadable(f"there is no notebook for {submission.lab}")
    if not _is_own_file(submission):
        raise Unreadable("the notebook is a link or not a regular file; hand in the notebook itself")
    if submission.path.stat().st_size > MOST_BYTES:
        raise Unreadable(f"the notebook is larger than {MOST_BYTES // 1_000_000} MB; clear its outputs")
    try:
        text = submission.path.read_text(encoding="utf-8-sig")  # Editors on Windows write a byte order mark.
        if not text.strip():
            raise Unreadable("the notebook is an empty file")
        with warnings.catch_warnings(action="ignore"):  # There is one for each cell without an id.
            notebook = nbformat.reads(json.dumps(_without_outputs(json.loads(text))), as_version=4)
            nbformat.validate(notebook, relax_add_props=True)
    except Unreadable:
        raise
    except json.JSONDecodeError:
        raise Unreadable("the file is not a valid notebook: it is not JSON, or it was cut off") from None
    except Exception as error:  # A broken file can make its reader fail anywhere.
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unreadable(f"the file is not a valid notebook: {first[:200]}") from None
    return notebook


def _without_outputs(notebook: dict) -> dict:
    """Remove all outputs. Grading does not read them, so broken or countless outputs must not cost any points.

    Raises:
        Unreadable: if the notebook has too many cells.
        KeyError, TypeError: if this is not a notebook.
    """
    for sheet in notebook.get("worksheets", [notebook]):  # Format 3 has worksheets.
        if len(sheet["cells"]) > MOST_CELLS:
            raise Unreadable(f"the notebook has more than {MOST_CELLS} cells")
        for cell in sheet["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = []
                if sheet is notebook:
                    cell["execution_count"] = None
    return notebook


def _is_own_file(submission: Submission) -> bool:
    """Return False for a link, which may lead to another student's work, and for a pipe, which may never end."""
    student = next(parent for parent in submission.path.parents if parent.name == submission.student)
    folders = [submission.path, *submission.path.parents]
    inside = folders[: folders.index(student)]
    return submission.path.is_file() and not any(path.is_symlink() for path in inside)


def exercises_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Return the student's code for each exercise, by grade_id. The order of the cells does not matter.

    An editor that splits or copies a cell also copies its grade_id. Such cells are joined, from top to bottom.
    """
    found: dict[str, list[str]] = {}
    for cell in notebook.cells:
        if name := _exercise_name(cell):
            found.setdefault(name, []).append(MAGICS.sub("", cell.source).strip())
    return {name: "\n\n".join(dict.fromkeys(sources)) for name, sources in found.items()}


def repeated_exercises(submission: Submission) -> list[str]:
    """Return the exercises that are in more than one cell. The student should know that."""
    names = [_exercise_name(cell) for cell in read(submission).cells]
    return sorted({name for name in names if name and names.count(name) > 1})


def _exercise_name(cell: nbformat.NotebookNode) -> str | None:
    """Return the name of a cell's exercise, or None if the cell is not an exercise."""
    grading = cell.metadata.get("nbgrader")
    if cell.cell_type != "code" or not isinstance(grading, dict) or not grading.get("solution"):
        return None
    return name if isinstance(name := grading.get("grade_id"), str) else None
