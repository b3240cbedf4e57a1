"""Reads the labs of this folder from their notebooks: which exercises they have, and for how many points.

A student's bundle contains only some of the course's labs. The checks themselves are not imported, because that would
import torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_CALL = re.compile(r"check\.(\w+)\(")


@dataclass(frozen=True)
class Exercise:
    """An exercise of a lab, as defined by its check cell."""

    key: str  # as in the record, such as "first_collectives.pass_right"
    points: float
    heading: str  # such as "Exercise 2.4 · The wrapper"
    stretch: bool  # later chapters do not build on it
    cell_id: str  # the cell of its heading

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class Lab:
    """A notebook in labs/ that has a lesson in chapters/."""

    file: str
    lesson_file: str
    title: str
    exercises: list[Exercise]


def labs(root: Path) -> tuple[list[Lab], list[str]]:
    """Return the labs of a folder in the order of their chapters, and the names of files that cannot be read.

    Only a notebook with a lesson is a lab; a copy that a student made is not.
    """
    found, unreadable = [], []
    for path in sorted((root / "labs").glob("*_lab.ipynb")):
        lesson_file = path.name.replace("_lab.ipynb", ".ipynb")
        if not (root / "chapters" / lesson_file).exists():
            continue
        try:
            found.append(_lab(path, lesson_file))
        # A file may contain anything.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            unreadable.append(path.name)
    return found, unreadable


def _lab(path: Path, lesson_file: str) -> Lab:
    notebook = json.loads(path.read_bytes())
    module = notebook["metadata"]["course"]["module"]
    title, heading, cell_id, exercises = path.stem, "", "", []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        first_line = source.partition("\n")[0]
        if cell["cell_type"] == "markdown" and first_line.startswith("# "):
            title = first_line.removeprefix("# ")
        elif cell["cell_type"] == "markdown" and first_line.startswith("## "):
            heading, cell_id = first_line, cell.get("id", "")
        grading = cell["metadata"].get("nbgrader", {})
        if grading.get("grade") and (call := _CALL.match(source)):
            key, points = f"{module}.{call[1]}", float(grading["points"])
            name = re.sub(r" \(.*\)$", "", heading.removeprefix("## "))  # without its minutes and points
            exercises.append(Exercise(key, points, name, "Stretch" in heading, cell_id))
    return Lab(path.name, lesson_file, title, exercises)
