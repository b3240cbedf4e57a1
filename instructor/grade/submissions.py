"""What students hand in, found and taken apart: `<folder>/<student>/<lab>/<notebook>.ipynb`, nbgrader's layout.

Of a submitted notebook only the exercise cells count, by their grade_id. All else, what is given and what is checked,
comes from the instructor's source, and no other file that lies beside the notebook is read.

Nothing here runs or compiles what a student wrote: the judge does, inside its sandbox.
"""

import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import nbformat

from instructor.build import Chapter, chapters

MAGICS = re.compile(r"\A(\s*%%(ranks|time|capture)\b[^\n]*)+")  # first lines, which say how a cell is run: no code
MOST_BYTES = 20_000_000  # a notebook is not as large, unless something printed without end
MOST_CELLS = 2000  # to look through 200 000 takes most of a minute, outside of any sandbox


class Unreadable(ValueError):
    """Why a submission cannot be graded, in one sentence."""


@dataclass(frozen=True)
class Submission:
    """One student's notebook for one lab; no path where none was handed in."""

    student: str
    lab: str
    path: Path | None


def find(folder: Path, lab: str) -> list[Submission]:
    """List every student's submission for a lab, by the student's name. A student is a folder."""
    return [Submission(student.name, lab, _notebook(student, lab)) for student in students_in(folder)]


def students_in(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def labs_in(folder: Path) -> list[Chapter]:
    """List the labs of which anybody handed something in."""
    return [
        chapter
        for chapter in chapters()
        if any((student / chapter.name).is_dir() or _notebook(student, chapter.name) for student in students_in(folder))
    ]


def _notebook(student: Path, lab: str) -> Path | None:
    """The student's notebook for a lab: the one of its name, then "04_overlap (1)", then one not named after a lab."""
    others = {chapter.name for chapter in chapters()} - {lab}
    for place in (student / lab, student):
        notebooks = [path for path in sorted(place.glob("*.ipynb")) if path.stem not in others]
        named = [path for path in notebooks if path.stem == lab]
        named += [path for path in notebooks if path.stem.startswith(lab) and path.stem != lab]
        named += notebooks if place != student else []
        if named:
            return named[0]
    return None


def beside(submission: Submission) -> list[str]:
    """→ what else lies where the notebook lies: it is not used, and the student should know"""
    if submission.path is None:
        return []
    expected = {submission.path.name, "timestamp.txt", ".ipynb_checkpoints"}
    return sorted(each.name for each in submission.path.parent.iterdir() if each.name not in expected)


def pieces_of(submission: Submission, chapter: Chapter) -> list[dict]:
    """→ the cells of the lab's module: the given ones as the instructor wrote them, the exercises as the student did

    Each is {"grade_id": the exercise's name, or None for a given cell, "source": its code}, in the lab's order. An
    exercise that is missing is left out.
    Raises: Unreadable for a file that is no notebook, or none of this lab.
    """
    theirs = exercises_in(read(submission))
    lab = chapter.read("lab")
    asked = [cell.metadata["nbgrader"]["grade_id"] for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    if not set(asked) & set(theirs):
        raise Unreadable(f"the notebook has none of this lab's exercises: {', '.join(asked)}")
    cells = []
    for cell in lab.cells:
        if {"export", "exercise", "given"} & set(cell.metadata.get("tags", [])):
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            source = cell.source if name is None else theirs.get(name, "")
            cells.append({"grade_id": name, "source": MAGICS.sub("", source).strip()})
    return [cell for cell in cells if cell["source"]]


def others_in(submission: Submission) -> list[str]:
    """→ the code cells that are no exercises: not graded, but what an exercise lacks may be defined there"""
    cells = [cell for cell in read(submission).cells if cell.cell_type == "code" and not _exercise(cell)]
    return [MAGICS.sub("", cell.source) for cell in cells]


def read(submission: Submission) -> nbformat.NotebookNode:
    """Raises: Unreadable"""
    if submission.path is None:
        raise Unreadable(f"there is no notebook for {submission.lab}")
    if not _own_file(submission):
        raise Unreadable("the notebook is a link, or no file: hand in the notebook itself")
    if submission.path.stat().st_size > MOST_BYTES:
        raise Unreadable(f"the notebook has more than {MOST_BYTES // 1_000_000} MB: clear its outputs")
    try:
        text = submission.path.read_text(encoding="utf-8-sig")  # Windows' editors write a mark before the text
        if not text.strip():
            raise Unreadable("the notebook is an empty file")
        with warnings.catch_warnings(action="ignore"):  # one for each cell without an id of its own
            notebook = nbformat.reads(json.dumps(_without_outputs(json.loads(text))), as_version=4)
            nbformat.validate(notebook, relax_add_props=True)
    except Unreadable:
        raise
    except json.JSONDecodeError:
        raise Unreadable("the file is no valid notebook: it is no JSON, or it was cut off") from None
    except Exception as error:  # a file may break what reads it anywhere: nested too deep, cells that are numbers
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unreadable(f"the file is no valid notebook: {first[:200]}") from None
    return notebook


def _without_outputs(notebook: dict) -> dict:
    """Nothing is read from outputs: whatever is wrong with them, or however many they are, costs nobody a point.

    Raises: Unreadable; KeyError and the like for what is no notebook.
    """
    for sheet in notebook.get("worksheets", [notebook]):  # as notebooks of format 3 have it
        if len(sheet["cells"]) > MOST_CELLS:
            raise Unreadable(f"the notebook has more than {MOST_CELLS} cells")
        for cell in sheet["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = []
                if sheet is notebook:
                    cell["execution_count"] = None
    return notebook


def _own_file(submission: Submission) -> bool:
    """False for a link, which may lead to another student's work, and for a pipe, which would never end."""
    student = next(parent for parent in submission.path.parents if parent.name == submission.student)
    folders = [submission.path, *submission.path.parents]
    inside = folders[: folders.index(student)]
    return submission.path.is_file() and not any(each.is_symlink() for each in inside)


def exercises_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """→ what a student wrote into each exercise, by grade_id, in whatever order the exercises stand

    An editor that splits or copies a cell copies its name too: such cells are one, as if run from top to bottom.
    """
    found: dict[str, list[str]] = {}
    for cell in notebook.cells:
        if name := _exercise(cell):
            found.setdefault(name, []).append(MAGICS.sub("", cell.source).strip())
    return {name: "\n\n".join(dict.fromkeys(sources)) for name, sources in found.items()}


def twice_in(submission: Submission) -> list[str]:
    """→ the exercises that stand in more than one cell, for the student to know"""
    names = [_exercise(cell) for cell in read(submission).cells]
    return sorted({name for name in names if name and names.count(name) > 1})


def _exercise(cell: nbformat.NotebookNode) -> str | None:
    """→ the name of the exercise that a cell is, or None"""
    grading = cell.metadata.get("nbgrader")
    if cell.cell_type != "code" or not isinstance(grading, dict) or not grading.get("solution"):
        return None
    return name if isinstance(name := grading.get("grade_id"), str) else None
