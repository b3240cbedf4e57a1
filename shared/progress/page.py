"""The page that `progress.show()` displays: what has passed in each lab of this folder, and the next step.

The labs, their exercises and their points come from the notebooks, because a bundle for students contains only some of
the labs of the course. The checks themselves are not imported, because that would import torch.
"""

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from shared.tables import render

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


@dataclass(frozen=True)
class Run:
    """One run of an exercise's checks, or a look at our version of it."""

    at: str  # ISO 8601, local time
    exercise: str  # the name that its lab uses, such as "first_collectives.pass_right"
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    saw_ours: bool = False

    @property
    def all_passed(self) -> bool:
        return bool(self.passed) and not self.failed


@dataclass(frozen=True)
class Standing:
    """The status of one exercise according to the record."""

    first_passed: Run | None = None
    newest: Run | None = None
    saw_ours: bool = False  # before it first passed


def standings(found: list[Run]) -> dict[str, Standing]:
    """Return the standing of each exercise that was tried, from runs in order of time."""
    by_exercise: dict[str, Standing] = {}
    for run in found:
        before = by_exercise.get(run.exercise, Standing())
        saw_ours = before.saw_ours or (run.saw_ours and before.first_passed is None)
        first = before.first_passed or (run if run.all_passed else None)
        by_exercise[run.exercise] = Standing(first, before.newest if run.saw_ours else run, saw_ours)
    return by_exercise


_PASSED, _FAILED, _NOT_TRIED = "✓", "✗", "–"
_LEGEND = (f"{_PASSED} passed", f"{_FAILED} tried, but not passed yet", f"{_NOT_TRIED} not tried yet")
_EMPTY = (
    "After you run a check in a lab, this cell shows your progress. It is only for you, and is never used for grading."
)


@dataclass(frozen=True)
class Link:
    """A link to a notebook of the course, or to a cell in it."""

    folder: str
    file: str
    cell_id: str = ""

    def __str__(self) -> str:
        return f"{self.folder}/{self.file}"


@dataclass(frozen=True)
class After:
    """What follows after an exercise has passed."""

    points: str  # such as "2 of 15 points"
    share: float  # of the lab's points
    words: str  # such as "next: Exercise 0.2 · The global mean"
    link: Link | None = None


class Page:
    """A student's progress as text and as HTML. Marks and words carry the meaning, and color only helps."""

    def __init__(self, root: Path, runs: list[Run], problem: str = ""):
        self.labs, unreadable = labs(root)
        self.runs = runs
        self.standings = standings(runs)
        self.notes = [problem] if problem else []
        if unreadable:
            self.notes.append(f"These files in labs/ cannot be read as labs: {', '.join(unreadable)}.")
        keys = {exercise.key for lab in self.labs for exercise in lab.exercises}
        self._newest = next((run.exercise for run in reversed(runs) if run.exercise in keys), "")

    # -- content

    def _standing(self, exercise: Exercise) -> Standing:
        return self.standings.get(exercise.key, Standing())

    def _passed(self, exercise: Exercise) -> bool:
        return self._standing(exercise).first_passed is not None

    def _started(self, lab: Lab) -> bool:
        return any(self._standing(exercise).newest for exercise in lab.exercises)

    def next_step(self) -> tuple[Lab, Exercise] | None:
        """Return the next exercise to do, or None if all have passed.

        The search begins with the lab that was tried last, and wraps around. Stretch exercises come last.
        """
        start = next((n for n, lab in enumerate(self.labs) if self._newest in {e.key for e in lab.exercises}), 0)
        ordered = [(lab, exercise) for lab in self.labs[start:] + self.labs[:start] for exercise in lab.exercises]
        remaining = [(lab, exercise) for lab, exercise in ordered if not self._passed(exercise)]
        return min(remaining, key=lambda pair: pair[1].stretch, default=None)  # min returns the first of equals

    def _next_sentence(self) -> tuple[str | Link, ...]:
        """Return the sentence about the next step, as a sequence of words and links."""
        if not any(lab.exercises for lab in self.labs):
            return ("There are no labs in this folder.",)
        step = self.next_step()
        if step is None:
            return (
                "You have passed every exercise in this folder. progress.finish() writes a page that you can keep.",
            )
        lab, exercise = step
        if self._started(lab):
            return f"Next: {exercise.name} in ", Link("labs", lab.file, exercise.cell_id), "."
        return "Next: read ", Link("chapters", lab.lesson_file), ", then do ", Link("labs", lab.file), "."

    def _marks(self, lab: Lab) -> list[tuple[str, str]]:
        """Return a mark and a name for each exercise."""
        marks = []
        for exercise in lab.exercises:
            standing = self._standing(exercise)
            sign = _PASSED if standing.first_passed else _FAILED if standing.newest else _NOT_TRIED
            words = exercise.name + " (stretch)" * exercise.stretch + " (saw ours)" * standing.saw_ours
            marks.append((sign, words))
        return marks

    def _failures(self, lab: Lab) -> list[str]:
        """Return a line for each exercise whose newest run failed: its checks, and when it first passed, if ever."""
        lines = []
        for exercise in lab.exercises:
            standing = self._standing(exercise)
            if standing.newest and not standing.newest.all_passed:
                run, first_passed = standing.newest, standing.first_passed
                passed = f"{_PASSED} {', '.join(run.passed)}" if run.passed else ""
                checks = "; ".join(part for part in (f"{_FAILED} {', '.join(run.failed)}", passed) if part)
                since = f" (it first passed on {first_passed.at[:10]})" if first_passed else ""
                lines.append(f"{exercise.name}, last run on {run.at[:10]}{since}: {checks}")
        return lines

    def passed(self, lab: Lab) -> list[tuple[Exercise, Run, bool]]:
        """Return the exercises that have passed, each with the run, and whether our version was seen before it."""
        standings = [(exercise, self._standing(exercise)) for exercise in lab.exercises]
        return [(exercise, each.first_passed, each.saw_ours) for exercise, each in standings if each.first_passed]

    def points(self, chosen: list[Lab]) -> tuple[float, float]:
        """Return the points of these labs' exercises that have passed, and of all their exercises."""
        exercises = [exercise for lab in chosen for exercise in lab.exercises]
        return sum(e.points for e in exercises if self._passed(e)), sum(e.points for e in exercises)

    def _score(self, chosen: list[Lab]) -> tuple[str, str]:
        """Return how many exercises of these labs have passed, and their points, as text."""
        passed, exercises = sum(len(self.passed(lab)) for lab in chosen), sum(len(lab.exercises) for lab in chosen)
        return f"{passed} of {exercises}", "{:g} of {:g}".format(*self.points(chosen))

    def after(self, key: str) -> "After | None":
        """Return the points of an exercise's lab and what comes next: an exercise of this lab, or the next lesson."""
        number = next((n for n, lab in enumerate(self.labs) if key in {e.key for e in lab.exercises}), None)
        if number is None:
            return None
        lab = self.labs[number]
        points = f"{self._score([lab])[1]} points"
        had, of = self.points([lab])
        left = sorted((e for e in lab.exercises if not self._passed(e)), key=lambda exercise: exercise.stretch)
        if left:
            return After(points, had / of, f"next: {left[0].heading}", Link("labs", lab.file, left[0].cell_id))
        if number + 1 < len(self.labs):
            lesson = Link("chapters", self.labs[number + 1].lesson_file)
            title = self.labs[number + 1].title.removeprefix("Lab ")
            return After(points, had / of, f"you have finished all exercises of this lab, next: lesson {title}", lesson)
        return After(points, had / of, "you have finished all exercises of this lab")

    # -- rendering

    def as_text(self) -> str:
        lines = ["".join(map(str, self._next_sentence())), *self.notes]
        if not self._newest:
            return "\n".join([*lines, _EMPTY])
        score = "{} exercises, {} points".format
        for lab in self.labs:
            lines.append(f"{lab.title}: {score(*self._score([lab]))}")
            if self._started(lab):
                # A mark must stay on the same line as its name.
                marks = "  ".join(f"{sign} {words}".replace(" ", "\0") for sign, words in self._marks(lab))
                lines += [f"    {line}".replace("\0", " ") for line in textwrap.wrap(marks, 92)]
                lines += [f"        {line}" for line in self._failures(lab)]
        return "\n".join([*lines, f"Passed: {score(*self._score(self.labs))}", "   ".join(_LEGEND)])

    def as_html(self) -> str:
        rows = []
        for lab in self.labs if self._newest else ():
            marks = self._marks(lab) if self._started(lab) else []
            rows.append({"lab": lab, "marks": marks, "failures": self._failures(lab), "score": self._score([lab])})
        return render(
            __package__,
            "page.html",
            next_sentence=self._next_sentence(),
            notes=self.notes,
            nothing_yet=_EMPTY,
            rows=rows,
            score=self._score(self.labs),
            legend=_LEGEND,
        )
