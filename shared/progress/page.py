"""The page that `progress.show()` shows: what has passed in each lab of this folder, and the next step."""

import html
import textwrap
from collections.abc import Callable
from pathlib import Path

from shared.progress.labs import Exercise, Lab, labs
from shared.progress.standings import Run, Standing, standings

_PASSED, _FAILED, _NOT_TRIED = "✓", "✗", "–"
_COLOURS = {_PASSED: "var(--jp-success-color1, #1a7f37)", _FAILED: "var(--jp-error-color1, #b42318)"}
_LEGEND = f"{_PASSED} passed   {_FAILED} tried, not passed yet   {_NOT_TRIED} not tried"
_CELL = "style='text-align:left;vertical-align:top;white-space:normal'"
_EMPTY = "When you have run a check in a lab, this cell shows what has passed. It is for you: nobody is graded by it."


class Page:
    """A student's progress as text and as HTML. Signs and words carry the meaning, colour only helps."""

    def __init__(self, root: Path, runs: list[Run], problem: str = ""):
        self.labs, unreadable = labs(root)
        self.standings = standings(runs)
        self.notes = [problem] if problem else []
        if unreadable:
            self.notes.append(f"Not readable as a lab: {', '.join(unreadable)}.")
        keys = {exercise.key for lab in self.labs for exercise in lab.exercises}
        self._newest = next((run.exercise for run in reversed(runs) if run.exercise in keys), "")

    # -- what is said

    def _standing(self, exercise: Exercise) -> Standing:
        return self.standings.get(exercise.key, Standing())

    def _passed(self, exercise: Exercise) -> bool:
        return self._standing(exercise).first_passed is not None

    def _begun(self, lab: Lab) -> bool:
        return any(self._standing(exercise).newest for exercise in lab.exercises)

    def next_step(self) -> tuple[Lab, Exercise] | None:
        """→ the next exercise: from the lab that was tried last, on and round; stretches when all else has passed"""
        at = next((n for n, lab in enumerate(self.labs) if self._newest in {e.key for e in lab.exercises}), 0)
        around = [(lab, exercise) for lab in self.labs[at:] + self.labs[:at] for exercise in lab.exercises]
        left = [(lab, exercise) for lab, exercise in around if not self._passed(exercise)]
        return min(left, key=lambda pair: pair[1].stretch, default=None)  # the first of equals

    def _next_words(self, link: Callable[..., str]) -> str:
        """link: turns a folder, a notebook's name and perhaps a cell's id into words that lead there."""
        if not any(lab.exercises for lab in self.labs):
            return "There are no labs in this folder."
        step = self.next_step()
        if step is None:
            return "Every exercise in this folder has passed."
        lab, exercise = step
        if self._begun(lab):
            return f"Next: {exercise.name} in {link('labs', lab.file, exercise.cell_id)}."
        return f"Next: read {link('chapters', lab.file)}, then do {link('labs', lab.file)}."

    def _marks(self, lab: Lab) -> list[tuple[str, str]]:
        """→ sign and words for each exercise"""
        marks = []
        for exercise in lab.exercises:
            standing = self._standing(exercise)
            sign = _PASSED if standing.first_passed else _FAILED if standing.newest else _NOT_TRIED
            marks.append((sign, exercise.name + " (stretch)" * exercise.stretch))
        return marks

    def _failures(self, lab: Lab) -> list[str]:
        """→ a line for each exercise whose newest run failed: its checks, and since when it has passed if it has"""
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

    def _score(self, chosen: list[Lab]) -> str:
        exercises = [exercise for lab in chosen for exercise in lab.exercises]
        passed = [exercise for exercise in exercises if self._passed(exercise)]
        points = f"{sum(each.points for each in passed):g} of {sum(each.points for each in exercises):g} points"
        return f"{len(passed)} of {len(exercises)} exercises, {points}"

    # -- how it is shown

    def as_text(self) -> str:
        lines = [self._next_words("{}/{}".format), *self.notes]
        if not self._newest:
            return "\n".join([*lines, _EMPTY])
        for lab in self.labs:
            lines.append(f"{lab.title}: {self._score([lab])}")
            if self._begun(lab):
                # A sign must not be parted from its name.
                marks = "  ".join(f"{sign} {words}".replace(" ", "\0") for sign, words in self._marks(lab))
                lines += [f"    {line}".replace("\0", " ") for line in textwrap.wrap(marks, 92)]
                lines += [f"        {line}" for line in self._failures(lab)]
        return "\n".join([*lines, f"Passed: {self._score(self.labs)}", _LEGEND])

    def as_html(self) -> str:
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self.notes)
        head = f"<div><b>{self._next_words(_link)}</b></div>{notes}"
        if not self._newest:
            return f"{head}<div>{_EMPTY}</div>"
        header = "".join(f"<th {_CELL}>{name}</th>" for name in ("lab", "exercises", "passed", "points"))
        rows = "".join(self._row(lab) for lab in self.labs)
        foot = f"<div>Passed: {self._score(self.labs)}.</div><div>{_LEGEND.replace('  ', ' &emsp;')}</div>"
        return f"{head}<table style='table-layout:auto;margin:8px 0'><tr>{header}</tr>{rows}</table>{foot}"

    def _row(self, lab: Lab) -> str:
        marks = "".join(
            "<span style='display:inline-block;margin-right:1em;white-space:nowrap'>"
            f"<b style='color:{_COLOURS.get(sign, 'inherit')}'>{sign}</b> {html.escape(words)}</span>"
            for sign, words in self._marks(lab)
        )
        failures = "".join(f"<div><small>{html.escape(line)}</small></div>" for line in self._failures(lab))
        cells = (
            f"{_link('labs', lab.file, words=lab.title)}, <small>{_link('chapters', lab.file, words='lesson')}</small>",
            f"{marks}{failures}" if self._begun(lab) else f"{_NOT_TRIED} not begun",
            *(part.rpartition(" ")[0] for part in self._score([lab]).split(", ")),
        )
        return "<tr>" + "".join(f"<td {_CELL}>{cell}</td>" for cell in cells) + "</tr>"


def _link(folder: str, name: str, cell_id: str = "", words: str = "") -> str:
    """A link from any of the course's folders of notebooks to a notebook; JupyterLab knows `#cell-id`."""
    place = html.escape(f"../{folder}/{name}" + (f"#cell-id={cell_id}" if cell_id else ""))
    return f"<a href='{place}'>{html.escape(words or f'{folder}/{name}')}</a>"
