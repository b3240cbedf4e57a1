"""Write points back to Canvas or Moodle: `python -m instructor.grade.export LAB FILE.csv`.

FILE.csv is what the platform offers for download: Canvas's gradebook, or the grading worksheet of a Moodle assignment.
The points are written into a copy of it, which the platform can import again. Students are matched by the platform's
number, which `python -m instructor.grade.arrivals` has put at the end of their folder's name. If a student has no
submission, or one that could not be graded, the table keeps what it has for this student, which is usually nothing.

Sources: Canvas's guide "How do I import grades in the Gradebook?", Moodle's documentation "Using Assignment", offline
grading worksheet.
"""

import argparse
import csv
import io
import re
import sys
from pathlib import Path

from instructor.build import chapters
from instructor.grade.records import FOLDER, write_whole
from instructor.release import number_of

PARTICIPANT = re.compile(r"(\d+)\s*$")


class NoMatch(ValueError):
    """Points cannot be written into a table; the message says why."""


def exported(lab: str, grades: Path, table: Path, column: str | None = None) -> tuple[str, list[str]]:
    """Return the platform's table with the points of a lab, and what an instructor should know, in sentences.

    Args:
        lab: Its full name.
        grades: The folder of `make grade`.
        column: The column of Canvas's gradebook. None: the only one that contains the lab's name.

    Raises:
        NoMatch: if the table is not from Canvas or Moodle, has no column for this lab, or has none of its students, or
            if two students have the same number.
    """
    ours = _our_rows(lab, grades)
    with table.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns, theirs = list(reader.fieldnames or ()), list(reader)
    if "Identifier" in columns and "Grade" in columns:
        key, column = "Identifier", "Grade"
    elif {"Student", "ID"} <= set(columns):
        key, column = "ID", column or _column_of(lab, columns)
    else:
        raise NoMatch(
            f"{table.name} has neither the columns of Canvas (Student, ID) nor those of Moodle (Identifier, Grade)"
        )
    if column not in columns:
        raise NoMatch(f"{table.name} has no column {column!r}")
    by_number = {found[1]: row for row in theirs if (found := PARTICIPANT.search(row[key] or ""))}
    if not by_number.keys() & ours.keys():
        raise NoMatch(f"no student of {lab} is in {table.name}; their folders must end with the platform's number")
    written = {
        number: ours[number]
        for number, row in by_number.items()
        if number in ours and _is_graded(ours[number]) and _can_be_changed(row)
    }
    for number, row in written.items():
        by_number[number][column] = f"{float(row['points']):g}"
    remarks = _about_maximum(theirs, column, list(written.values()), table.name)
    return _as_csv(columns, theirs), [*remarks, *_about_students(ours, by_number, table.name)]


def _our_rows(lab: str, grades: Path) -> dict[str, dict]:
    """Return the rows of gradebook.csv about a lab, by the platform's number of the student.

    Raises:
        NoMatch: if two students have the same number.
    """
    with (grades / "gradebook.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["lab"] == lab]
    by_number: dict[str, dict] = {}
    for row in rows:
        if (other := by_number.setdefault(_number_of(row["student"]), row)) is not row:
            raise NoMatch(f"the folders {other['student']} and {row['student']} end with the same number")
    return by_number


def _is_graded(row: dict) -> bool:
    return row.get("graded") != "no"


def _can_be_changed(row: dict) -> bool:
    """Return False if Moodle has locked the grade of this row, so that it would ignore a new one."""
    return (row.get("Grade can be changed") or "").strip().lower() != "no"


def _about_students(ours: dict[str, dict], theirs: dict[str, dict], name: str) -> list[str]:
    """Return a sentence for each student whose points were not written. Both tables are by number."""
    remarks = [f"{row['student']} is not in {name}" for number, row in ours.items() if number not in theirs]
    for number, row in theirs.items():
        student = row.get("Full name") or row.get("Student") or row.get("Identifier")
        if number not in ours:
            remarks.append(f"nothing was written for {student}: there is no submission here")
        elif not _is_graded(ours[number]):
            remarks.append(f"nothing was written for {student}: {ours[number]['reason']}")
        elif not _can_be_changed(row):
            points = f"{float(ours[number]['points']):g}"
            remarks.append(f"nothing was written for {student}: Moodle has locked this grade ({points} points here)")
    return remarks


def _as_csv(columns: list[str], rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _about_maximum(theirs: list[dict], column: str, rows: list[dict], name: str) -> list[str]:
    """Return what is wrong with the platform's maximum, if anything. Points are written as they are, not scaled."""
    of_canvas = (row[column] for row in theirs if (row.get("Student") or "").strip() == "Points Possible")
    of_moodle = (row["Maximum Grade"] for row in theirs if row.get("Maximum Grade"))
    text = next(iter([*of_canvas, *of_moodle]), None) or ""
    if not rows or not re.fullmatch(r"\s*\d+([.,]\d+)?\s*", text):
        return []
    most, ours = float(text.replace(",", ".")), float(rows[0]["max_points"])
    remarks = [f"the maximum is {most:g} in {name} and {ours:g} here, and points are not scaled"] * (most != ours)
    above = [row["student"] for row in rows if float(row["points"]) > most]
    if above and "Maximum Grade" in theirs[0]:
        remarks.append(f"Moodle may not accept points above its maximum of {most:g}: {'; '.join(above)}")
    return remarks


def _number_of(student: str) -> str:
    found = PARTICIPANT.search(student)
    return found[1] if found else student


def _column_of(lab: str, columns: list[str]) -> str:
    named = [column for column in columns if lab in column]
    if len(named) != 1:
        raise NoMatch(f"{len(named)} columns contain {lab!r}; name one with --column")
    return named[0]


def _lab_named(text: str) -> str:
    """Return the full name of a lab, which may be given by its number alone."""
    return next((lab.name for lab in chapters() if text.isdecimal() and number_of(lab) == int(text)), text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.grade.export", description=__doc__.splitlines()[0])
    parser.add_argument("lab", type=_lab_named, help="such as 02 or 02_manual_ddp")
    parser.add_argument("table", type=Path, help="the CSV file that Canvas or Moodle offers for download")
    parser.add_argument("--grades", type=Path, default=FOLDER, help="default: build/grades")
    parser.add_argument("--column", help="of Canvas's gradebook; default: the one that contains the lab's name")
    options = parser.parse_args()
    try:
        text, remarks = exported(options.lab, options.grades, options.table, options.column)
    except (NoMatch, OSError) as error:
        parser.error(str(error))
    path = options.grades / f"{options.table.stem}-{options.lab}.csv"
    write_whole(path, text)
    print(f"Wrote {path}.")
    for remark in remarks:
        print(f"  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
