"""Write points back to Canvas or Moodle: `python -m instructor.grade.export LAB FILE.csv`.

FILE.csv is what the platform offers for download: Canvas's gradebook, or the grading worksheet of a Moodle assignment.
The points are written into a copy of it, which the platform can import again. Students are matched by the platform's
number, which `python -m instructor.grade.lms_zips` has put at the end of their folder's name. If a student has no
submission, or one that could not be graded, the table keeps what it has for this student, which is usually nothing.
The table may be in any language, and saved by Excel.

Sources: Canvas's guide "How do I import grades in the Gradebook?", Moodle's documentation "Using Assignment", offline
grading worksheet.
"""

import argparse
import re
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path

from instructor.build import chapters
from instructor.grade import tables
from instructor.grade.records import FOLDER, write_whole
from instructor.grade.submissions import ANONYMOUS
from instructor.grade.tables import Table
from instructor.release import number_of
from shared.checks.terminal import show_anything

PARTICIPANT = re.compile(r"(\d+)\s*$")
NUMBER = re.compile(r"\s*-?\d+([.,]\d+)?\s*")
# "no" in Moodle's column "Grade can be changed", in the languages with the most sites
NO = {"no", "nein", "non", "não", "nee", "nej", "nei", "nie", "ne", "ei", "nem", "hayır", "нет", "ні", "いいえ", "否"}


class NoMatch(ValueError):
    """Points cannot be written into a table; the message says why."""


@dataclass(frozen=True)
class Places:
    """The columns of a platform's table, by their index."""

    key: int  # with the platform's number of a student
    points: int
    name: int
    maximum: int | None = None  # Moodle's; Canvas has it in a row
    changeable: int | None = None  # Moodle's

    @property
    def is_moodles(self) -> bool:
        return self.maximum is not None


def exported(lab: str, grades: Path, path: Path, column: str | None = None) -> tuple[str, list[str]]:
    """Return the platform's table with the points of a lab, and what an instructor should know, in sentences.

    A cell that contains a word, such as EX for a student who is excused, stays as it is.

    Args:
        lab: Its full name.
        grades: The folder of `make grade`.
        path: The table that the platform offers for download.
        column: The column of Canvas's gradebook. None: the only one that contains the lab's name.

    Raises:
        NoMatch: if the table is not from Canvas or Moodle, has no column for this lab, or has none of its students, or
            if two students have the same number.
        tables.Unreadable: if the table cannot be read.
    """
    ours, table = _our_rows(lab, grades), tables.read(path)
    places = _places(table, ours, lab, column, path.name)
    by_number = {found[1]: row for row in table.rows if (found := PARTICIPANT.search(row[places.key]))}
    if not by_number.keys() & ours.keys():
        raise NoMatch(f"no student of {lab} is in {path.name}; their folders must end with the platform's number")
    remarks, written = [], []
    for number, row in by_number.items():
        points, remark = _points_for(ours.get(number), row, places)
        remarks += [remark] if remark else []
        if points is not None:
            row[places.points] = points
            written.append(ours[number])
    missing = [f"{row['student']} is not in {path.name}" for number, row in ours.items() if number not in by_number]
    return table.as_text(), [*_about_maximum(table, places, written, path.name), *missing, *remarks]


def _points_for(ours: dict[str, str] | None, row: list[str], places: Places) -> tuple[str | None, str]:
    """Return what to write for a student, if anything, and a sentence if this is not what anybody would expect."""
    student, before = row[places.name].strip() or row[places.key], row[places.points].strip()
    nothing = f"nothing was written for {student}"
    if ours is None:
        return None, f"{nothing}: there is no submission here"
    if ours.get("graded") == "no":
        return None, f"{nothing}: {ours['reason']}"
    points = f"{float(ours['points']):g}"
    if places.changeable is not None and row[places.changeable].strip().lower() in NO:
        return None, f"{nothing}: Moodle has locked this grade ({points} points here)"
    if before and not NUMBER.fullmatch(before):
        return None, f"{nothing}: the cell contains {before!r} ({points} points here)"
    changed = bool(before) and _as_number(before) != float(points)
    return points, f"{student} had {before} points and now has {points}" if changed else ""


def names_in(path: Path, students: Iterable[str]) -> dict[str, str]:
    """Return the students' names in a platform's table, by their folders.

    Raises:
        tables.Unreadable: if the table cannot be read.
        OSError: if it cannot be opened.
    """
    table, by_number = tables.read(path), {_number_of(student): student for student in students}
    key = _key_of(table, by_number)
    if key is None:
        return {}
    name = _name_beside(table, key)
    found = {PARTICIPANT.search(row[key]): row[name].strip() for row in table.rows}
    return {by_number[number[1]]: text for number, text in found.items() if number and number[1] in by_number and text}


def _places(table: Table, ours: dict[str, dict], lab: str, column: str | None, name: str) -> Places:
    """Find the columns by their English names or, in other languages, by what they contain.

    Raises:
        NoMatch: if they are not there.
    """
    columns, key = table.columns, _key_of(table, ours)
    if key is None:
        raise NoMatch(f"{name} has neither the columns of Canvas (Student, ID) nor those of Moodle (Identifier, Grade)")
    if columns[key] != "Identifier" and all(row[key].strip().isdecimal() for row in table.rows if row[key].strip()):
        points = column or _column_of(lab, columns)
        if points not in columns:
            raise NoMatch(f"{name} has no column {points!r}")
        return Places(key, columns.index(points), _name_beside(table, key))
    if "Grade" in columns:
        points = columns.index("Grade")
        maximum = columns.index("Maximum Grade") if "Maximum Grade" in columns else -1
    else:
        points = _points_before_maximum(table, key, name)
        maximum = points + 1
    changeable = next((at for at in range(len(columns)) if {row[at].strip().lower() for row in table.rows} & NO), None)
    return Places(key, points, _name_beside(table, key), maximum, changeable)


def _key_of(table: Table, numbers: Container[str]) -> int | None:
    """Return the index of the column with the platform's numbers, or None."""
    for named in ("Identifier", "ID"):
        beside = "Grade" if named == "Identifier" else "Student"
        if {named, beside} <= set(table.columns):
            return table.columns.index(named)
    cells = [
        [found[1] for row in table.rows if (found := PARTICIPANT.search(row[at]))] for at in range(len(table.columns))
    ]
    hits = [sum(number in numbers for number in column) for column in cells]
    return hits.index(max(hits)) if any(hits) else None


def _points_before_maximum(table: Table, key: int, name: str) -> int:
    """Return the index of Moodle's grades: numbers or nothing, beside a column with the same number in all rows."""
    for at in range(key + 1, len(table.columns) - 1):
        grades, most = ({row[beside].strip() for row in table.rows} for beside in (at, at + 1))
        if (
            len(most) == 1
            and NUMBER.fullmatch(min(most))
            and all(not text or NUMBER.fullmatch(text) for text in grades)
        ):
            return at
    raise NoMatch(f"{name} has no column of grades with their maximum beside it, as Moodle's grading worksheets have")


def _name_beside(table: Table, key: int) -> int:
    """Return the index of the students' names: after Moodle's identifiers, before Canvas's. If there are none: key."""
    is_text = [any(re.search(r"[^\W\d_]", row[at]) for row in table.rows) for at in range(len(table.columns))]
    after = [at for at in (key - 1, key + 1) if 0 <= at < len(is_text) and is_text[at]]
    return (after or [key])[-1 if is_text[key] else 0]


def _our_rows(lab: str, grades: Path) -> dict[str, dict]:
    """Return the rows of gradebook.csv about a lab, by the platform's number of the student.

    Raises:
        NoMatch: if two students have the same number.
    """
    rows = [row for row in tables.read(grades / "gradebook.csv").by_column() if row["lab"] == lab]
    by_number: dict[str, dict] = {}
    for row in rows:
        if (other := by_number.setdefault(_number_of(row["student"]), row)) is not row:
            raise NoMatch(f"the folders {other['student']} and {row['student']} end with the same number")
    return by_number


def _about_maximum(table: Table, places: Places, written: list[dict], name: str) -> list[str]:
    """Return what is wrong with the platform's maximum, if anything. Points are written as they are, not scaled."""
    at, without_number = places.points, [row for row in table.rows if not row[places.key].strip()]
    maximum = -1 if places.maximum is None else places.maximum
    texts = [row[maximum] for row in table.rows] if maximum >= 0 else []
    texts = texts or [row[at] for row in without_number]
    numbers = [_as_number(text) for text in texts if NUMBER.fullmatch(text.strip())]
    if not written or not numbers:
        return []
    most, ours = numbers[0], float(written[0]["max_points"])
    remarks = [f"the maximum is {most:g} in {name} and {ours:g} here, and points are not scaled"] * (most != ours)
    above = [row["student"] for row in written if float(row["points"]) > most]
    if above and places.is_moodles:
        remarks.append(f"Moodle may not accept points above its maximum of {most:g}: {'; '.join(above)}")
    return remarks


def _as_number(text: str) -> float:
    return float(text.strip().replace(",", "."))


def _number_of(student: str) -> str:
    found = None if student.startswith(ANONYMOUS) else PARTICIPANT.search(student)
    return found[1] if found else student


def _column_of(lab: str, columns: list[str]) -> str:
    named = [column for column in columns if lab in column]
    if len(named) != 1:
        raise NoMatch(f"{len(named)} columns contain {lab!r}; name one with --column")
    return named[0]


def lab_named(text: str) -> str:
    """Return the full name of a lab, which may be given by its number alone."""
    return next((lab.name for lab in chapters() if text.isdecimal() and number_of(lab) == int(text)), text)


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.grade.export", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("lab", type=lab_named, help="such as 02 or 02_manual_ddp")
    parser.add_argument("table", type=Path, help="the CSV file that Canvas or Moodle offers for download")
    parser.add_argument("--grades", type=Path, default=FOLDER, help="default: build/grades")
    parser.add_argument("--column", help="of Canvas's gradebook; default: the one that contains the lab's name")
    options = parser.parse_args()
    try:
        text, remarks = exported(options.lab, options.grades, options.table, options.column)
    except (NoMatch, tables.Unreadable, OSError) as error:
        parser.error(str(error))
    path = options.grades / f"{options.table.stem}-{options.lab}.csv"
    write_whole(path, text)
    print(f"Wrote {path}.")
    for remark in remarks:
        print(f"  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
