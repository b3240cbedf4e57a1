"""Write all records as tables, with a row per lab, exercise or student, and each record as JSON for Gradescope."""

import json
from pathlib import Path

from instructor.grade.policy import Policy
from instructor.grade.records import Record, as_cell, write_whole
from instructor.grade.tables import Table
from shared.checks.engine import display

COLUMNS = ("student", "lab", "points", "max_points", "reason", "look_at", "feedback", "graded", "name")
EXERCISE_COLUMNS = ("student", "lab", "number", "exercise", "points", "max_points", "checks_passed", "checks", "reason")
EXERCISE_COLUMNS += ("comment",)


def write(records: list[Record], folder: Path, policy: Policy) -> None:
    """Write gradebook.csv, with a row per student and lab, exercises.csv, and totals.csv, with a row per student."""
    rows = [
        (
            *(r.student, r.lab, r.points, r.max_points, r.why, "; ".join(r.notices)),
            *(f"feedback/{r.student}/{r.lab}.html", "yes" if r.is_graded else "no", r.name),
        )
        for r in records
    ]
    write_table(folder / "gradebook.csv", COLUMNS, rows)
    write_table(folder / "exercises.csv", EXERCISE_COLUMNS, [row for r in records for row in _exercises(r)])
    labs = sorted({record.lab for record in records})
    students = sorted({record.student for record in records})
    of = {(record.student, record.lab): record for record in records}
    totals = [_total(student, [of.get((student, lab)) for lab in labs], labs, policy) for student in students]
    write_table(folder / "totals.csv", ("student", *labs, "percent"), totals)


def _total(student: str, of_labs: list[Record | None], labs: list[str], policy: Policy) -> tuple:
    """Return a student's points in each lab, and the mean of the labs' percentages by their weights."""
    weights = [policy.lab(lab).weight for lab in labs]
    shares = [record.points / record.max_points if record and record.max_points else 0.0 for record in of_labs]
    weighted = sum(weight * share for weight, share in zip(weights, shares, strict=True))
    points = ["" if record is None else record.points for record in of_labs]
    return (student, *points, round(100 * weighted / sum(weights), 2) if sum(weights) else "")


def write_table(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> None:
    """Write a table as CSV. No spreadsheet reads any of its cells as a formula, and Excel sees that it is UTF-8."""
    safe = [[as_cell(value) if isinstance(value, str) else value for value in row] for row in rows]
    write_whole(path, Table([*columns], safe, marked=True).as_text())


def _exercises(record: Record) -> list[tuple]:
    return [
        (
            *(record.student, record.lab, answer.number, answer.name, answer.points, answer.max_points),
            *(sum(verdict.passed for verdict in answer.verdicts), len(answer.verdicts), answer.reason, answer.comment),
        )
        for answer in record.answers
    ]


def write_gradescope(record: Record, folder: Path) -> None:
    """Write gradescope/<student>/<lab>/results.json."""
    write_results(record, folder / "gradescope" / record.student / record.lab / "results.json")


def write_results(record: Record, path: Path) -> None:
    """Write a record in the format that Gradescope expects of an autograder.

    Source: Gradescope's documentation, "Autograder Specifications", output format.
    """
    tests = [
        {
            "number": answer.number,
            "name": answer.name,
            "score": answer.points,
            "max_score": answer.max_points,
            "status": "passed" if answer.points == answer.max_points else "failed",
            "output": "\n".join(
                part for part in (answer.comment, answer.reason, display.as_text(answer.verdicts)) if part
            ),
            "output_format": "text",
            "visibility": "visible",
        }
        for answer in record.answers
    ]
    results = {
        "score": record.points,
        "execution_time": round(record.seconds),
        "output": "\n".join([record.why, *([record.next_step] if record.next_step else []), *record.notes]),
        "output_format": "text",
        "tests": tests,
    }
    write_whole(path, json.dumps(results, indent=1))


def write_failure(why: str, path: Path) -> None:
    """Write, in the same format, why nothing could be graded."""
    write_whole(path, json.dumps({"score": 0.0, "output": why, "output_format": "text"}, indent=1))
