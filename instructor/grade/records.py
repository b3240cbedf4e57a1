"""What became of one student's lab, kept as one file: a grader that was killed goes on where it was."""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from instructor.grade.submissions import MOST_BYTES, Submission
from shared.checks.engine.verdicts import Verdict

MOST_CHARACTERS = 2000  # of a reason in a table; a spreadsheet spreads what is above 32 767 over further rows


def one_line(text: str) -> str:
    """Without what a terminal obeys, or cannot show: an error's text may move its cursor to another student's row."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} …"


@dataclass
class Answer:
    """What one exercise is worth; the reason says why there are no verdicts."""

    number: str
    name: str  # of the exercise: "no_sync" is asked of OverlappedDDP
    points: float
    max_points: float
    verdicts: list[Verdict] = field(default_factory=list)
    reason: str = ""

    def __str__(self):
        failed = [verdict.check for verdict in self.verdicts if not verdict.passed]
        why = self.reason or (f"failed: {', '.join(failed)}" if failed else "passed")
        return f"{self.number} {self.name}: {why}"


@dataclass
class Record:
    """What one student's lab is worth, and why."""

    student: str
    lab: str
    digest: str  # of what was handed in, and of what judged it
    answers: list[Answer]
    reason: str = ""  # why nothing could be graded
    notes: list[str] = field(default_factory=list)  # for the student
    notices: list[str] = field(default_factory=list)  # for the instructor alone
    seconds: float = 0.0
    final: bool = True  # False: this machine failed, and the next run tries again

    @property
    def points(self) -> float:
        return round(sum((answer.points for answer in self.answers), 0.0), 2)

    @property
    def max_points(self) -> float:
        return sum((answer.max_points for answer in self.answers), 0.0)

    @property
    def why(self) -> str:
        """The reason for these points, in one line."""
        if self.reason:
            return one_line(self.reason)
        short = [str(answer) for answer in self.answers if answer.points < answer.max_points]
        return one_line("; ".join(short)) or "all checks passed"


def digest_of(submission: Submission, course: str) -> str:
    """→ what a record stands for: these bytes, judged by this course"""
    handed_in = b"none"
    if submission.path is not None and submission.path.is_file():
        with contextlib.suppress(OSError), submission.path.open("rb") as file:
            handed_in = file.read(MOST_BYTES + 1)
    return hashlib.sha256(course.encode() + handed_in).hexdigest()


def path_of(folder: Path, student: str, lab: str) -> Path:
    return folder / "records" / student / f"{lab}.json"


def save(record: Record, folder: Path) -> None:
    """Write a record whole, or not at all."""
    write_whole(path_of(folder, record.student, record.lab), json.dumps(asdict(record), indent=1))


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(beside, path)


def not_graded(submission: Submission, error: Exception) -> Record:
    """→ the row of a submission that this machine could not judge: nobody is lost for it"""
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return Record(submission.student, submission.lab, "", [], f"not graded, run the grader again: {said}", final=False)


def load(folder: Path, student: str, lab: str) -> Record | None:
    """→ the record of a student's lab, if there is a whole one"""
    try:
        kept = json.loads(path_of(folder, student, lab).read_text())
        answers = [Answer(**(each | {"verdicts": verdicts_from(each["verdicts"])})) for each in kept["answers"]]
        return Record(**(kept | {"answers": answers}))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def verdicts_from(told: list[dict]) -> list[Verdict]:
    """Raises: TypeError, KeyError for what is no verdict."""
    return [Verdict(**(each | {"world_sizes": tuple(each["world_sizes"])})) for each in told]
