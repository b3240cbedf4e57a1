"""The labs of this folder, as their notebooks say: which exercises, for how many points.

A bundle holds only some of the course's labs. The checks themselves are not imported: they would bring torch.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

_CALL = re.compile(r"check\.(\w+)\(")


@dataclass(frozen=True)
class Exercise:
    """A check cell of a lab."""

    key: str  # as in the record: "first_collectives.pass_right"
    points: float
    stretch: bool  # goes beyond what later chapters build on
    cell_id: str  # of its heading

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class Lab:
    """A notebook of labs/ that has its lesson in chapters/."""

    file: str
    title: str
    exercises: list[Exercise]


def labs(root: Path) -> tuple[list[Lab], list[str]]:
    """→ the labs of a folder, in order of their chapters; those that cannot be read

    A lab is what has a lesson of the same name: copies that a student made have none.
    """
    found, unreadable = [], []
    for path in sorted((root / "labs").glob("*.ipynb")):
        if not (root / "chapters" / path.name).exists():
            continue
        try:
            found.append(_lab(path))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # a file may hold anything
            unreadable.append(path.name)
    return found, unreadable


def _lab(path: Path) -> Lab:
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
            exercises.append(Exercise(key, points, "Stretch" in heading, cell_id))
    return Lab(path.name, title, exercises)
