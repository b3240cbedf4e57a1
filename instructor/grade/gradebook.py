"""Write all records as tables, with a row per lab or per exercise, and a results.json per record for Gradescope."""

import csv
import io
import json
from pathlib import Path

from instructor.grade.records import Record, one_line, write_whole
from shared.checks.engine import display

COLUMNS = ("student", "lab", "points", "max_points", "reason", "look_at", "feedback")
EXERCISE_COLUMNS = ("student", "lab", "number", "exercise", "points", "max_points", "checks_passed", "checks", "reason")


def write(records: list[Record], folder: Path) -> None:
    """Write gradebook.csv, with a row per student and lab, and exercises.csv, with a row per exercise."""
    rows = [
        (r.student, r.lab, r.points, r.max_points, r.why, "; ".join(r.notices), f"feedback/{r.student}/{r.lab}.html")
        for r in records
    ]
    write_whole(folder / "gradebook.csv", _as_csv(COLUMNS, rows))
    write_whole(folder / "exercises.csv", _as_csv(EXERCISE_COLUMNS, [row for r in records for row in _exercises(r)]))


def _exercises(record: Record) -> list[tuple]:
    return [
        (
            *(record.student, record.lab, answer.number, answer.name, answer.points, answer.max_points),
            *(sum(verdict.passed for verdict in answer.verdicts), len(answer.verdicts), answer.reason),
        )
        for answer in record.answers
    ]


def _as_csv(columns: tuple[str, ...], rows: list[tuple]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([[_safe(value) for value in row] for row in rows])
    return text.getvalue()


def _safe(value):
    """Return a value as one line that no spreadsheet reads as a formula.

    Some spreadsheets split cells at semicolons, whatever is quoted, so there are none.
    """
    if not isinstance(value, str):
        return value
    text = one_line(value).replace(";", ",")
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def write_gradescope(record: Record, folder: Path) -> None:
    """Write gradescope/<student>/<lab>/results.json in the format that Gradescope expects of an autograder.

    Source: Gradescope's documentation, "Autograder Specifications", output format.
    """
    tests = [
        {
            "number": answer.number,
            "name": answer.name,
            "score": answer.points,
            "max_score": answer.max_points,
            "status": "passed" if answer.points == answer.max_points else "failed",
            "output": "\n".join(part for part in (answer.reason, display.as_text(answer.verdicts)) if part),
            "output_format": "text",
            "visibility": "visible",
        }
        for answer in record.answers
    ]
    results = {
        "score": record.points,
        "execution_time": round(record.seconds),
        "output": "\n".join([record.why, *record.notes]),
        "output_format": "text",
        "tests": tests,
    }
    write_whole(folder / "gradescope" / record.student / record.lab / "results.json", json.dumps(results, indent=1))
