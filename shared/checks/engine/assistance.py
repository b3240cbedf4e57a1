"""Find what a failed check shows below its verdicts: the exercise's hints and its original cell.

Both are blocks of HTML that open on a click. They need no widgets, so they also work in VS Code, in Colab and in saved
notebooks. No front end lets a kernel reliably rewrite another cell, so students copy the original to start over.

The notebook itself is the source: the build stores each exercise's original cell in the notebook's metadata.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from shared.ranks import reader

_DETAILS = re.compile(r"<details>.*?</details>", re.DOTALL)


@dataclass(frozen=True)
class Assistance:
    """The help for one exercise."""

    hints: tuple[str, ...] = ()  # as HTML
    originals: tuple[str, ...] = ()  # the sources of the exercise's cells, as the lab had them
    ours: tuple[str, ...] = ()  # the sources of the same cells in the solution, where there is one


def find(name: str) -> Assistance:
    """Return what the notebook of this kernel offers for an exercise, such as "first_collectives.pass_right".

    If the notebook's file is not known or cannot be read, the result is empty.
    """
    path = reader.path()
    try:
        return read(json.loads(path.read_bytes()), name, _sources_of_solution(path)) if path else Assistance()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # the file may contain anything
        return Assistance()


def _sources_of_solution(lab: Path) -> dict[str, str]:
    """Return the source of each cell of the lab's solution by its id. A bundle may have no solution."""
    path = lab.parent.parent / "solutions" / lab.name.replace("_lab.", "_solution.")
    if not path.exists():
        return {}
    return {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_bytes())["cells"]}


def read(notebook: dict, name: str, solutions: dict[str, str] | None = None) -> Assistance:
    """Return the hints between an exercise's heading and its check, its original cells, and those of the solution.

    Args:
        solutions: The source of each cell of the lab's solution by its id.
    """
    solutions = solutions or {}
    originals = notebook["metadata"]["course"].get("originals", {})
    call = f"check.{name.rpartition('.')[2]}("
    hints, cells, ours = [], [], []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            if source.startswith("## "):
                hints, cells, ours = [], [], []
            hints += _DETAILS.findall(source)
        elif source.startswith(call):
            return Assistance(tuple(hints), tuple(cells), tuple(ours))
        elif cell.get("id") in originals:
            cells.append(originals[cell["id"]])
            ours += [solutions[cell["id"]]] if cell["id"] in solutions else []
    return Assistance()
