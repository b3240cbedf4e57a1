"""What students hand in, found and taken apart: `<folder>/<student>/<lab>/<notebook>.ipynb`, nbgrader's layout.

Of a submitted notebook only the exercise cells count, by their grade_id. All else, what is given and what is checked,
comes from the instructor's source: `candidate_of` puts both together into a module that the checks can try.
"""

from dataclasses import dataclass
from pathlib import Path

import nbformat

from shared.build import Chapter

MAGIC = "%%ranks"
STUB = 'raise NotImplementedError("your code here")'
MOST_BYTES = 20_000_000  # a notebook is not as large, unless something printed without end


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
    found = []
    for student in sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith(".")):
        notebooks = sorted((student / lab).glob("*.ipynb")) or sorted(student.glob("*.ipynb"))
        named = [path for path in notebooks if path.stem == lab] or notebooks
        found.append(Submission(student.name, lab, named[0] if named else None))
    return found


def candidate_of(submission: Submission, chapter: Chapter) -> str:
    """→ a module: the given cells as the instructor wrote them, the exercises as the student did

    An exercise that is missing stays unwritten.
    Raises: Unreadable for a file that is no notebook, or none of this lab.
    """
    theirs = exercises_in(read(submission))
    lab = chapter.read("lab")
    asked = [cell.metadata["nbgrader"]["grade_id"] for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    if not set(asked) & set(theirs):
        raise Unreadable(f"the notebook has none of this lab's exercises: {', '.join(asked)}")
    parts = []
    for cell in lab.cells:
        if "export" in cell.metadata.get("tags", []):
            name = cell.metadata.get("nbgrader", {}).get("grade_id")
            source = cell.source if name is None else theirs.get(name, "")
            parts.append(source.removeprefix(MAGIC).strip())
    return "\n\n\n".join(part for part in parts if part) + "\n"


def read(submission: Submission) -> nbformat.NotebookNode:
    """Raises: Unreadable"""
    if submission.path is None:
        raise Unreadable(f"there is no notebook for {submission.lab}")
    if submission.path.stat().st_size > MOST_BYTES:
        raise Unreadable(f"the notebook has more than {MOST_BYTES // 1_000_000} MB: clear its outputs")
    try:
        text = submission.path.read_text(encoding="utf-8")
        if not text.strip():
            raise Unreadable("the notebook is an empty file")
        notebook = nbformat.reads(text, as_version=4)
        nbformat.validate(notebook)
    except (nbformat.ValidationError, ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        if isinstance(error, Unreadable):
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unreadable(f"the file is no valid notebook: {first[:200]}") from None
    return notebook


def exercises_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """→ what a student wrote into each exercise, by grade_id, in whatever order the cells stand

    Raises: Unreadable where one exercise stands twice: which one counts?
    """
    found: dict[str, str] = {}
    for cell in notebook.cells:
        grading = cell.metadata.get("nbgrader", {})
        if cell.cell_type == "code" and grading.get("solution") and (name := grading.get("grade_id")):
            if name in found and found[name] != cell.source:
                raise Unreadable(f"the exercise {name} stands in two cells: leave one")
            found[name] = cell.source
    return found
