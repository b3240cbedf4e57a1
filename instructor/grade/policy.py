"""Turn what the checks found into grades: overrides by hand, bonus exercises, weights, deadlines and late submissions.

`course.toml` in the folder of submissions says how points count. Everything in it is optional:

    names = "gradebook.csv"       # a table of the platform, beside course.toml, with the names to show on pages

    [late]
    percent_per_day = 10          # of the points that were earned, for each day that has begun
    days = 3                      # after this many days, a submission earns nothing
    grace_minutes = 15

    [labs.02_manual_ddp]
    deadline = 2026-11-30T23:59:00+01:00
    weight = 2                    # in totals.csv; 1 by default
    bonus = ["2.6"]               # exercises whose points are not part of the maximum

The file `timestamp.txt` beside a notebook says when it was handed in, for example 2026-12-01T22:00:00+01:00. nbgrader
writes this file, and so does `python -m instructor.grade.lms_zips` if the platform's zip file contains the time. You
can also write it yourself, for example to grant more time.

`overrides.csv` in the folder of grades has a row per decision, with the columns student, exercise, points, comment. The
points may be empty if there is only a comment. They may exceed the maximum of the exercise, which the run reports, but
they must not be negative. The deduction for a late submission applies to these points, too. The file is only read, so
it survives every run. A row whose student or exercise does not exist has no effect, and the run says so.
"""

import math
import re
import tomllib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from instructor.build import chapters
from instructor.grade import export, tables
from instructor.grade.records import Answer, Record, as_cell, counted, one_line
from instructor.grade.submissions import TIMESTAMP, Submission

OVERRIDES = "overrides.csv"
COLUMNS = ("student", "exercise", "points", "comment")
DAY = timedelta(days=1)
MOST_NAMES = 5  # of students in one sentence in the terminal


class Mistake(ValueError):
    """A file that the instructor wrote cannot be used; the message says where and why."""


@dataclass(frozen=True)
class Late:
    """What a late submission loses."""

    percent_per_day: float = 0.0
    days: int | None = None  # None: no limit
    grace_minutes: float = 0.0

    def factor(self, days: int) -> float:
        """Return the share of the points that count after this many days."""
        if self.days is not None and days > self.days:
            return 0.0
        return max(0.0, 1.0 - days * self.percent_per_day / 100)


@dataclass(frozen=True)
class Lab:
    """What an instructor decided about a lab."""

    deadline: datetime | None = None
    weight: float = 1.0
    bonus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Override:
    """One decision about a student's exercise."""

    points: float | None
    comment: str


@dataclass(frozen=True)
class Policy:
    """All decisions of an instructor."""

    labs: dict[str, Lab] = field(default_factory=dict)
    late: Late = field(default_factory=Late)
    overrides: dict[tuple[str, str], Override] = field(default_factory=dict)  # by student, as in tables, and exercise
    names: dict[str, str] = field(default_factory=dict)  # by the students' folders

    def lab(self, name: str) -> Lab:
        return self.labs.get(name, Lab())

    def unused(self, students: Iterable[str], exercises: dict[str, list[str]]) -> list[str]:
        """Return a sentence for each decision that has no effect because a name in it is wrong.

        Args:
            students: All students.
            exercises: The numbers of the exercises of each lab. Other labs are ignored.
        """
        known, found = {_key_of(student) for student in students}, []
        of_chapter = {int(lab.split("_")[0]): numbers for lab, numbers in exercises.items()}
        for student, exercise in self.overrides:
            chapter = exercise.split(".")[0]
            numbers = of_chapter.get(int(chapter), [exercise]) if chapter.isdecimal() else []
            if student not in known:
                found.append(f"{OVERRIDES} names the student {student!r}, who does not exist")
            elif exercise not in numbers:
                found.append(f"{OVERRIDES} names the exercise {exercise!r}, which does not exist")
        bonus = [(lab, number) for lab in exercises for number in self.lab(lab).bonus]
        wrong = [(lab, number) for lab, number in bonus if number not in exercises[lab]]
        found += [f"The bonus exercise {number!r} of {lab} in course.toml does not exist" for lab, number in wrong]
        return [f"{what}, so this has no effect" for what in found]

    def applied(self, record: Record, submission: Submission | None) -> Record:
        """Return a record with overrides, bonus exercises and the deduction for a late submission."""
        answers = [self._applied(answer, record) for answer in record.answers]
        changed = replace(record, answers=answers, name=self.names.get(record.student, ""))
        deadline = self.lab(record.lab).deadline
        handed_in = _handed_in(submission, deadline) if submission and submission.path and deadline else None
        if deadline is None or not changed.is_graded or submission is None or submission.path is None:
            return changed
        if handed_in is None:
            return replace(changed, undated=True)
        days = math.ceil((handed_in - deadline - timedelta(minutes=self.late.grace_minutes)) / DAY)
        if days <= 0:
            return changed
        counts = self.late.factor(days)
        late = f"{days} day{'s' if days > 1 else ''} late, so {counts:.0%} of the points count"
        return replace(changed, late=late, deducted=round((1 - counts) * changed.points, 2))

    def _applied(self, answer: Answer, record: Record) -> Answer:
        override = self.overrides.get((_key_of(record.student), answer.number))
        bonus = answer.number in self.lab(record.lab).bonus
        if override is None:
            return replace(answer, bonus=bonus)
        if override.points is None:
            return replace(answer, bonus=bonus, comment=override.comment)
        return replace(
            answer, bonus=bonus, points=override.points, checked_points=answer.points, comment=override.comment
        )


def remarks(records: list[Record]) -> list[str]:
    """Return what an instructor should know about the grades, in sentences."""
    unknown = undated(records, MOST_NAMES)
    return ([unknown] if unknown else []) + [
        f"{OVERRIDES}: {one_line(record.student)} gets {counted(answer.points)} for exercise {answer.number}, "
        f"which has a maximum of {answer.max_points:g}"
        for record in records
        for answer in record.answers
        if answer.by_hand and answer.points > answer.max_points
    ]


def undated(records: Iterable[Record], most_names: int | None = None) -> str:
    """Return one sentence about all submissions that may have been late, because their time is unknown, or ""."""
    names = list(dict.fromkeys(one_line(record.student) for record in records if record.undated))
    if not names:
        return ""
    shown = ", ".join(names[:most_names])
    if most_names is not None and len(names) > most_names:
        shown += f" and {len(names) - most_names} more, which index.html lists"
    why = f"there is no {TIMESTAMP} beside the notebook, or its time is not like 2026-12-01T22:00:00+01:00"
    return f"It is unknown whether these submissions were late, because {why}: {shown}"


def _handed_in(submission: Submission, deadline: datetime) -> datetime | None:
    """Return when a notebook was handed in, as nbgrader and `instructor.grade.lms_zips` note it beside the notebook."""
    if submission.path is None:
        return None
    try:
        stamp = submission.path.parent / TIMESTAMP
        text = stamp.read_text(encoding="utf-8-sig", errors="replace")[:100].strip()
        when = datetime.fromisoformat(re.sub(r" ?(UTC|GMT|Z)$", "+00:00", text))
    except (OSError, ValueError):
        return None
    return when if when.tzinfo else when.replace(tzinfo=deadline.tzinfo)


def load(course: Path, overrides: Path, students: Iterable[str] = ()) -> Policy:
    """Read course.toml and overrides.csv. A file that does not exist decides nothing.

    Raises:
        Mistake: if one of them cannot be used.
    """
    labs, late, names = _course(course, students) if course.exists() else ({}, Late(), {})
    return Policy(labs, late, _overrides(overrides) if overrides.exists() else {}, names)


def _names(path: Path, students: Iterable[str]) -> dict[str, str]:
    try:
        return export.names_in(path, students)
    except (tables.Unreadable, OSError) as error:
        raise Mistake(f"the students' names: {error}") from None


def _course(path: Path, students: Iterable[str]) -> tuple[dict[str, Lab], Late, dict[str, str]]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Some editors write a byte order mark.
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Mistake(f"{path.name} is not valid TOML: {error}") from None
    _expect(content, ("names", "late", "labs"), path.name)
    known = [chapter.name for chapter in chapters()]
    _expect(content.get("labs", {}), known, f"[labs] in {path.name}")
    late = _made(Late, content.get("late", {}), f"[late] in {path.name}")
    labs = {
        name: _made(Lab, of_lab, f"[labs.{name}] in {path.name}") for name, of_lab in content.get("labs", {}).items()
    }
    for name, lab in labs.items():
        if lab.deadline is not None and lab.deadline.tzinfo is None:
            raise Mistake(f"the deadline of {name} needs a time zone, such as {lab.deadline.isoformat()}+01:00")
    return labs, late, _names(path.parent / str(content["names"]), students) if "names" in content else {}


def _made(cls: type, values: dict, where: str):
    """Build one of the classes above from a section."""
    _expect(values, list(cls.__dataclass_fields__), where)
    kinds = {"deadline": datetime, "bonus": list, "days": int}
    for name, value in values.items():
        kind = kinds.get(name, (int, float))
        wrong_kind = not isinstance(value, kind) or isinstance(value, bool)
        if wrong_kind or (isinstance(value, (int, float)) and value < 0):
            wanted = {datetime: "a date with a time", list: 'a list such as ["2.6"]', int: "a whole number"}
            raise Mistake(f"{name} in {where} must be {wanted.get(kind, 'a number of at least 0')}, got {value!r}")
    return cls(**{name: tuple(map(str, value)) if name == "bonus" else value for name, value in values.items()})


def _expect(found: dict, known: Iterable[str], where: str) -> None:
    unknown = [name for name in found if name not in known]
    if unknown:
        raise Mistake(f"{where} has the unknown name {unknown[0]!r}; the known names are {', '.join(known)}")


def _overrides(path: Path) -> dict[tuple[str, str], Override]:
    found: dict[tuple[str, str], Override] = {}
    try:
        table = tables.read(path)
    except tables.Unreadable as error:
        raise Mistake(str(error)) from None
    if tuple(name.lower() for name in table.columns if name) != COLUMNS:
        raise Mistake(f"the first line of {path.name} must be {','.join(COLUMNS)}")
    for line, (student, exercise, points, comment) in zip(table.lines, (row[:4] for row in table.rows), strict=True):
        points = points.strip()
        try:
            decided = float(points.replace(",", ".")) if points else None
        except ValueError:
            decided = math.nan
        if decided is not None and not math.isfinite(decided):
            raise Mistake(f"{path.name}, line {line}: {points!r} is not a number of points")
        if decided is not None and decided < 0:
            raise Mistake(f"{path.name}, line {line}: the points must not be negative, got {points}")
        found[_key_of(student), exercise.strip()] = Override(decided, comment.strip())
    return found


def _key_of(student: str) -> str:
    """Return a student's name as in tables. Systems write the same accents in two ways."""
    return unicodedata.normalize("NFC", as_cell(student))
