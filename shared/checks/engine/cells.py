"""Knows the cells of this notebook: which one a check judges, and which help the notebook has for an exercise.

A check judges the cell that ran last, which may not be the one on the screen. A cell with a syntax error defines
nothing, a cell that was edited but not run has not defined anything yet, and a cell without %%ranks defines something
in the notebook. In these cases the ranks still have an earlier version, and a verdict about that one would mislead.

Below its verdicts, a failed check shows the hints of its exercise and its original cell. Both are blocks of HTML that
open on a click. They need no widgets, so they also work in VS Code, in Colab and in saved notebooks. No front end lets
a kernel reliably rewrite another cell, so students copy the original to start over. The notebook itself is the source:
the build stores the original cell of each exercise in its metadata.
"""

import ast
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

from IPython import get_ipython

from shared.ranks import reader

_FAILED = "Your last run of this cell failed, so there is nothing new to check."
_DEFINED = re.compile(r"^(?:def|class)\s+(\w+)|^(\w+)\s*(?::[^=\n]+)?=(?!=)", re.MULTILINE)


@dataclass(frozen=True)
class RunCell:
    """A run of a cell that would define a name."""

    number: int | None  # the number beside the cell
    source: str
    at: float  # seconds since 1970
    syntax_error: str = ""  # such as "SyntaxError in line 3: '(' was never closed"


_newest: dict[str, RunCell] = {}


def listen() -> None:
    """Begin to remember the cells that run in this notebook. Does nothing outside a notebook, and nothing twice."""
    shell = get_ipython()
    if hasattr(shell, "kernel") and _remember not in shell.events.callbacks["post_run_cell"]:
        shell.events.register("post_run_cell", _remember)


def nothing_new(name: str) -> str:
    """Return why the version of a name that ran is not the one that the student sees, and what to do, or ""."""
    run = _newest.get(name)
    if run is None:
        return ""
    if run.syntax_error:
        return f"{_FAILED} {run.syntax_error}. Fix the cell and run it again."
    if not run.source.lstrip().startswith("%%ranks"):
        where = f"The cell that ran as [{run.number}] defines {name} in the notebook, not on the ranks."
        return f"{where} Begin the cell with %%ranks, and run it again."
    if _changed_since(name, run):
        return f"You have changed this cell since it ran as [{run.number}]. Run it first."
    return ""


def judged(name: str) -> str:
    """Return which version of a name a check judges, or "" if nobody listened when it ran."""
    run = _newest.get(name)
    return f"Judged: the cell that ran as [{run.number}]." if run is not None else ""


def _changed_since(name: str, run: RunCell) -> bool:
    """Return whether the notebook was saved after the run, with other versions of the cell only."""
    path = reader.path()
    try:
        if path is None or path.stat().st_mtime <= run.at:
            return False
        cells = json.loads(path.read_bytes())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError):  # the file may contain anything
        return False
    versions = [source.strip() for source in sources if name in _names(source)]
    return bool(versions) and run.source.strip() not in versions


def _remember(result) -> None:
    source = result.info.raw_cell or ""
    run = RunCell(result.execution_count, source, time.time(), _syntax_error(source))
    _newest.update(dict.fromkeys(_names(source), run))


def _names(source: str) -> set[str]:
    """Return the names that a cell defines at its top level. This also works for a cell with a syntax error."""
    return {name for pair in _DEFINED.findall(source) for name in pair if name}


def _syntax_error(source: str) -> str:
    """Return what is wrong with a cell's syntax, or "". Lines have the numbers that the notebook shows."""
    if source.startswith("%%"):
        source = "#" + source
    try:
        ast.parse(get_ipython().input_transformer_manager.transform_cell(source))
    except SyntaxError as error:
        return f"{type(error).__name__} in line {error.lineno}: {error.msg}"
    return ""


_DETAILS = re.compile(r"<details>.*?</details>", re.DOTALL)


@dataclass(frozen=True)
class Assistance:
    """The help for one exercise."""

    hints: tuple[str, ...] = ()  # as HTML
    originals: tuple[str, ...] = ()  # the sources of the exercise's cells, as the lab had them
    ours: tuple[str, ...] = ()  # the sources of the same cells in the solution, where there is one


def help_for(name: str) -> Assistance:
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
