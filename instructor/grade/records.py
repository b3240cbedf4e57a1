"""Keep the result of each student's lab in its own file, so that grading can continue after it was killed."""

import contextlib
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from instructor.build import ROOT
from instructor.grade.submissions import MOST_BYTES, Submission
from shared.checks.engine.verdicts import Verdict

FOLDER = ROOT / "build" / "grades"
UNANSWERED = "unanswered"  # the reason of an exercise whose cells are as they were handed out
BEFORE_FORMULA = re.compile(r';[ "]*(?=[=+\-@])')
MOST_CHARACTERS = 2000  # of a reason in a table; a spreadsheet splits cells above 32,767 characters


def one_line(text: str) -> str:
    """Return the text as one line without control characters, which could overwrite other lines in a terminal."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} …"


def as_cell(text: str) -> str:
    """Return the text as one line that no spreadsheet reads as a formula.

    Some spreadsheets split cells at semicolons, even inside quotes, so no formula may follow a semicolon either.
    """
    line = BEFORE_FORMULA.sub(r"\g<0>'", one_line(text))
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) else line


def counted(points: float) -> str:
    """Return a number of points in words."""
    return f"{points:g} point{'' if points == 1 else 's'}"


@dataclass
class Answer:
    """The points and verdicts of one exercise. If there are no verdicts, `reason` says why."""

    number: str
    name: str  # of the exercise: "no_sync" is an exercise on OverlappedDDP
    points: float
    max_points: float
    verdicts: list[Verdict] = field(default_factory=list)
    reason: str = ""
    replaced_by_ours: list[str] = field(default_factory=list)  # numbers of earlier exercises
    cells: list[str] = field(default_factory=list)  # the grade_ids of the cells with its code
    bonus: bool = False  # Its points are not part of the maximum.
    checked_points: float | None = None  # what the checks gave, if the instructor decided otherwise
    comment: str = ""  # the instructor's

    @property
    def title(self) -> str:
        return f"{self.number} {self.name}"

    @property
    def why(self) -> str:
        """The reason for the points."""
        why = self.reason or self._checks_by_result() or "passed"
        why += f" ({self.by_hand})" if self.by_hand else ""
        return why + (
            f" (judged with the course's own {' and '.join(self.replaced_by_ours)})" if self.replaced_by_ours else ""
        )

    @property
    def by_hand(self) -> str:
        """What the instructor decided, or "" if only the checks did."""
        if self.checked_points is None:
            return ""
        return f"{counted(self.points)} by hand{f': {self.comment}' if self.comment else ''}"

    def _checks_by_result(self) -> str:
        """Name the checks that did not pass: those that failed, and those that did not run."""
        parts = []
        for result in ("failed", "did not run"):
            names = [verdict.check for verdict in self.verdicts if not verdict.passed and verdict.result == result]
            shown = f"all {len(names)} checks" if len(names) == len(self.verdicts) > 3 else ", ".join(names)
            parts += [f"{result}: {shown}"] if names else []
        return "; ".join(parts)


@dataclass
class Record:
    """The points of one student's lab, and the reasons for them."""

    student: str
    lab: str
    digest: str  # of the notebook and of the course that judged it
    answers: list[Answer]
    reason: str = ""  # why nothing could be graded
    notes: list[str] = field(default_factory=list)  # for the student
    notices: list[str] = field(default_factory=list)  # for the instructor only
    code: dict[str, str] = field(default_factory=dict)  # by the grade_ids of exercise cells, line for line
    seconds: float = 0.0
    late: str = ""  # how late it was, and what that costs
    deducted: float = 0.0  # points, for that reason
    undated: bool = False  # whether it is unknown if it was late
    notebook: str = ""  # the digest of the notebook alone
    final: bool = True  # False if this machine failed; the next run tries again
    name: str = ""  # the student's, if the instructor has a table of names

    @property
    def points(self) -> float:
        return round(self.earned - self.deducted, 2)

    @property
    def earned(self) -> float:
        """The points before anything is deducted for a late submission."""
        return round(sum((answer.points for answer in self.answers), 0.0), 2)

    @property
    def max_points(self) -> float:
        return sum((answer.max_points for answer in self.answers if not answer.bonus), 0.0)

    @property
    def is_graded(self) -> bool:
        """Whether the points mean something, because the grader or the instructor has read the notebook."""
        return not self.reason or any(answer.by_hand for answer in self.answers)

    @property
    def next_step(self) -> str:
        """What a student can do if the notebook could not be graded."""
        if not self.reason or not self.final:
            return ""
        return f"Hand in the file {notebook_of(self.lab)} as JupyterLab saves it."

    @property
    def why(self) -> str:
        """The reason for these points, in one line."""
        if self.reason:
            return one_line("; ".join([self.reason, *(f"{a.title}: {a.by_hand}" for a in self.answers if a.by_hand)]))
        exercises: dict[str, list[str]] = {}  # by what is said about them, so that nothing is said twice
        for answer in self.answers:
            if answer.points < answer.max_points or answer.replaced_by_ours or answer.by_hand:
                exercises.setdefault(answer.why.removesuffix("."), []).append(answer.title)
        short = [f"{', '.join(titles)}: {why}" for why, titles in exercises.items()]
        return one_line("; ".join([*([self.late] if self.late else []), *short])) or "all checks passed"


def notebook_of(lab: str) -> str:
    """Return the file of a lab that students hand in."""
    return f"labs/{lab}_lab.ipynb"


def digest_of(submission: Submission, course: str) -> str:
    """Return a digest of the notebook's bytes and of the course that judges them."""
    handed_in = repr(submission.instead).encode(errors="surrogateescape")
    if submission.path is not None and submission.path.is_file():
        with contextlib.suppress(OSError), submission.path.open("rb") as file:
            handed_in = file.read(MOST_BYTES + 1)
    return hashlib.sha256(course.encode() + handed_in).hexdigest()


def path_of(folder: Path, student: str, lab: str) -> Path:
    return folder / "records" / student / f"{lab}.json"


def save(record: Record, folder: Path) -> None:
    """Write a record completely or not at all."""
    write_whole(path_of(folder, record.student, record.lab), json.dumps(asdict(record), indent=1))


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all, even if this process is killed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(beside, path)


def not_graded(submission: Submission, why: str) -> Record:
    """Return the record of a submission that this machine could not judge, so that every student has a row."""
    reason = f"not graded, so run the grader again: {' '.join(why.split())}"
    return Record(submission.student, submission.lab, "", [], reason, final=False)


def load(folder: Path, student: str, lab: str) -> Record | None:
    """Return the saved record of a student's lab, or None if it is missing or broken."""
    try:
        kept = json.loads(path_of(folder, student, lab).read_text(encoding="utf-8"))
        answers = [Answer(**(answer | {"verdicts": verdicts_from(answer["verdicts"])})) for answer in kept["answers"]]
        return Record(**(kept | {"answers": answers}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def verdicts_from(saved: list[dict[str, Any]]) -> list[Verdict]:
    """Return verdicts that were read from JSON.

    Raises:
        TypeError, KeyError: if an entry is not a verdict.
    """
    return [replace(Verdict(**verdict), world_sizes=tuple(verdict["world_sizes"])) for verdict in saved]
