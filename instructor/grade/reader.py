"""Read a submitted notebook inside the sandbox, and report its code cells.

    python -m instructor.grade.reader JOB.json FD

A notebook is a student's work as well: one of 20 MB can be written so that reading it needs gigabytes. The job names a
file descriptor, because the sandbox shows no student's folder. Two lines of JSON are written to the pipe FD:

    {"ready": true}
    {"cells": [{"name": the exercise's grade_id or null, "source": its code, "on_ranks": bool}, ...]}
                                                                                        or {"unreadable": why}
"""

import json
import os
import re
import sys
from pathlib import Path

from instructor.grade.limits import Limits, become, bound

MAGICS = re.compile(r"\A(\s*%%(ranks|time|capture)\b[^\n]*)+")  # first lines that say how to run a cell
MOST_CELLS = 2000
MOST_CHARACTERS = 500_000  # of code; the longest of our solutions has 15,000


class Unreadable(ValueError):
    """A submission cannot be graded; the message says why in one sentence."""


def code_cells_in(data: bytes) -> list[dict]:
    """Return a notebook's code cells. Lines with magics that say how to run a cell are empty. Outputs are left out.

    Reads all versions of the format since 3. What grading does not need may be missing or broken.

    Raises:
        Unreadable: if this is not a notebook.
    """
    text = data.decode("utf-8-sig", errors="replace")  # Editors on Windows write a byte order mark.
    if not text.strip():
        raise Unreadable("the notebook is an empty file")
    try:
        notebook = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable("the file is not a valid notebook: it is not JSON, or it was cut off") from None
    except MemoryError:
        raise Unreadable("the notebook needs too much memory to be read; clear its outputs") from None
    try:
        sheets = notebook.get("worksheets", [notebook])  # Format 3 has worksheets.
        cells = [cell for sheet in sheets for cell in sheet["cells"]]
        found = [_code_cell(cell) for cell in cells if cell["cell_type"] == "code"]
    except (KeyError, TypeError, AttributeError):
        raise Unreadable("the file is not a valid notebook: its cells do not have the notebook format") from None
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"the notebook has more than {MOST_CELLS} cells")
    if sum(len(cell["source"]) for cell in found) > MOST_CHARACTERS:
        raise Unreadable(f"the notebook has more than {MOST_CHARACTERS:,} characters of code")
    return found


def _code_cell(cell: dict) -> dict:
    source = cell["source"] if "source" in cell else cell["input"]  # Format 3 calls it input.
    source = source if isinstance(source, str) else "".join(source)
    source = source.replace("\r\n", "\n")
    on_ranks = "%%ranks" in (MAGICS.match(source) or [""])[0]
    return {"name": _exercise_name(cell.get("metadata")), "source": without_first_magics(source), "on_ranks": on_ranks}


def without_first_magics(source: str) -> str:
    """Return a cell's code with empty lines in place of the first lines that say how to run it."""
    return MAGICS.sub(lambda magics: "\n" * magics.group().count("\n"), source)


def exercises_in(lab) -> dict[str, str]:
    """Return the code of each exercise in one of our own notebooks of a lab, by its grade_id."""
    cells = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    return {cell.metadata["nbgrader"]["grade_id"]: without_first_magics(cell.source) for cell in cells}


def _exercise_name(metadata) -> str | None:
    """Return the name of a cell's exercise, or None if the cell is not an exercise."""
    grading = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    if not isinstance(grading, dict) or not grading.get("solution"):
        return None
    return name if isinstance(name := grading.get("grade_id"), str) else None


def main(job_file: str, results: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    bound(Limits(**job["limits"]))
    become(job["users"][0])
    with os.fdopen(int(results), "w", encoding="utf-8") as pipe, os.fdopen(job["handed_in"], "rb") as handed_in:
        print(json.dumps({"ready": True}), file=pipe, flush=True)
        try:
            line = {"cells": code_cells_in(handed_in.read())}
        except Unreadable as error:
            line = {"unreadable": str(error)}
        print(json.dumps(line), file=pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])
