"""The page that `progress.show()` displays: what has passed in each lab of this folder, and the next step."""

import textwrap
from dataclasses import dataclass
from pathlib import Path

from shared.progress.labs import Exercise, Lab, labs
from shared.progress.standings import Run, Standing, standings
from shared.tables.rendering import render

_PASSED, _FAILED, _NOT_TRIED = "✓", "✗", "–"
_LEGEND = (f"{_PASSED} passed", f"{_FAILED} tried, not passed yet", f"{_NOT_TRIED} not tried")
_EMPTY = "When you have run a check in a lab, this cell shows what has passed. It is for you: nobody is graded by it."


@dataclass(frozen=True)
class Link:
    """A link to a notebook of the course, or to a cell in it."""

    folder: str
    file: str
    cell_id: str = ""

    def __str__(self) -> str:
        return f"{self.folder}/{self.file}"


class Page:
    """A student's progress as text and as HTML. Marks and words carry the meaning, and color only helps."""

    def __init__(self, root: Path, runs: list[Run], problem: str = ""):
        self.labs, unreadable = labs(root)
        self.standings = standings(runs)
        self.notes = [problem] if problem else []
        if unreadable:
            self.notes.append(f"Not readable as a lab: {', '.join(unreadable)}.")
        keys = {exercise.key for lab in self.labs for exercise in lab.exercises}
        self._newest = next((run.exercise for run in reversed(runs) if run.exercise in keys), "")

    # -- content

    def _standing(self, exercise: Exercise) -> Standing:
        return self.standings.get(exercise.key, Standing())

    def _passed(self, exercise: Exercise) -> bool:
        return self._standing(exercise).first_passed is not None

    def _begun(self, lab: Lab) -> bool:
        return any(self._standing(exercise).newest for exercise in lab.exercises)

    def next_step(self) -> tuple[Lab, Exercise] | None:
        """Return the next exercise to do, or None if all have passed.

        The search begins with the lab that was tried last, and wraps around. Stretch exercises come last.
        """
        at = next((n for n, lab in enumerate(self.labs) if self._newest in {e.key for e in lab.exercises}), 0)
        around = [(lab, exercise) for lab in self.labs[at:] + self.labs[:at] for exercise in lab.exercises]
        left = [(lab, exercise) for lab, exercise in around if not self._passed(exercise)]
        return min(left, key=lambda pair: pair[1].stretch, default=None)  # min returns the first of equals

    def _next_words(self) -> tuple[str | Link, ...]:
        """Return the sentence about the next step, as a sequence of words and links."""
        if not any(lab.exercises for lab in self.labs):
            return ("There are no labs in this folder.",)
        step = self.next_step()
        if step is None:
            return ("Every exercise in this folder has passed.",)
        lab, exercise = step
        if self._begun(lab):
            return f"Next: {exercise.name} in ", Link("labs", lab.file, exercise.cell_id), "."
        return "Next: read ", Link("chapters", lab.file), ", then do ", Link("labs", lab.file), "."

    def _marks(self, lab: Lab) -> list[tuple[str, str]]:
        """Return a mark and a name for each exercise."""
        marks = []
        for exercise in lab.exercises:
            standing = self._standing(exercise)
            sign = _PASSED if standing.first_passed else _FAILED if standing.newest else _NOT_TRIED
            marks.append((sign, exercise.name + " (stretch)" * exercise.stretch))
        return marks

    def _failures(self, lab: Lab) -> list[str]:
        """Return a line for each exercise whose newest run failed: its checks, and when it first passed, if it did."""
        lines = []
        for exercise in lab.exercises:
            standing = self._standing(exercise)
            if standing.newest and not standing.newest.all_passed:
                run, before = standing.newest, standing.first_passed
                passed = f"{_PASSED} {', '.join(run.passed)}" if run.passed else ""
                checks = "; ".join(part for part in (f"{_FAILED} {', '.join(run.failed)}", passed) if part)
                since = f" (it passed on {before.at[:10]})" if before else ""
                lines.append(f"{exercise.name}, last run on {run.at[:10]}{since}: {checks}")
        return lines

    def _score(self, chosen: list[Lab]) -> tuple[str, str]:
        """Return how many exercises of these labs have passed, and their points, as text."""
        exercises = [exercise for lab in chosen for exercise in lab.exercises]
        passed = [exercise for exercise in exercises if self._passed(exercise)]
        points = f"{sum(each.points for each in passed):g} of {sum(each.points for each in exercises):g}"
        return f"{len(passed)} of {len(exercises)}", points

    # -- rendering

    def as_text(self) -> str:
        lines = ["".join(map(str, self._next_words())), *self.notes]
        if not self._newest:
            return "\n".join([*lines, _EMPTY])
        score = "{} exercises, {} points".format
        for lab in self.labs:
            lines.append(f"{lab.title}: {score(*self._score([lab]))}")
            if self._begun(lab):
                # A mark must stay on the same line as its name.
                marks = "  ".join(f"{sign} {words}".replace(" ", "\0") for sign, words in self._marks(lab))
                lines += [f"    {line}".replace("\0", " ") for line in textwrap.wrap(marks, 92)]
                lines += [f"        {line}" for line in self._failures(lab)]
        return "\n".join([*lines, f"Passed: {score(*self._score(self.labs))}", "   ".join(_LEGEND)])

    def as_html(self) -> str:
        rows = []
        for lab in self.labs if self._newest else ():
            marks = self._marks(lab) if self._begun(lab) else []
            rows.append({"lab": lab, "marks": marks, "failures": self._failures(lab), "score": self._score([lab])})
        return render(
            __package__,
            "page.html",
            next_words=self._next_words(),
            notes=self.notes,
            nothing_yet=_EMPTY,
            rows=rows,
            score=self._score(self.labs),
            legend=_LEGEND,
        )
