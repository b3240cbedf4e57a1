"""List the tasks of a lab, and compute how many points an answer gets."""

import importlib
import math
import re
from dataclasses import dataclass

from instructor.build import Chapter
from shared.checks.engine.framework import Exercise
from shared.checks.engine.verdicts import Verdict

_CALL = re.compile(r"^check\.(\w+)\(\)", re.MULTILINE)
ESSENTIAL = "values"  # Without right values, no other check earns points.


@dataclass(frozen=True)
class Task:
    """One graded cell of a lab and the exercise that it checks."""

    name: str  # of the exercise in its check module: "ManualDDP"
    number: str  # "2.4"
    piece: str
    points: float
    cells: tuple[str, ...] = ()  # the grade_ids of the cells in which students write it


def module_of(chapter: Chapter) -> str:
    """Return the name of the module that a lab builds. Its checks have the same name."""
    return chapter.read("lab").metadata["course"]["module"]


def tasks_of(chapter: Chapter) -> list[Task]:
    """List what is graded in a chapter's lab, in the lab's order."""
    checks = importlib.import_module(f"shared.checks.{module_of(chapter)}")
    found: list[Task] = []
    written: list[str] = []
    for cell in chapter.read("lab").cells:
        grading = cell.metadata.get("nbgrader", {})
        if grading.get("solution"):
            written.append(grading["grade_id"])
        if grading.get("grade"):
            (name,) = _CALL.findall(cell.source)
            exercise: Exercise = getattr(checks, name)
            own = tuple(written) or next(task.cells for task in reversed(found) if task.piece == exercise.piece)
            found.append(Task(name, exercise.number, exercise.piece, float(grading["points"]), own))
            written = []
    return found


def credit(points: float, verdicts: list[Verdict]) -> float:
    """Divide an exercise's points evenly over its checks, rounded down to 0.01. Wrong values earn no points.

    Code that does nothing also sends and keeps nothing, so it would pass the checks that count bytes.
    """
    if not verdicts:
        return 0.0
    if not essential_of(verdicts).passed:
        return 0.0
    passed = sum(verdict.passed for verdict in verdicts)
    return points if passed == len(verdicts) else math.floor(100 * points * passed / len(verdicts)) / 100


def essential_of(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict without which an exercise earns nothing: that of the check for values, or else the first."""
    return next((verdict for verdict in verdicts if verdict.check == ESSENTIAL), verdicts[0])
