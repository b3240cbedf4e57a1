"""A page per student and lab, with each verdict and its hint; and a page for the instructor that leads to them all."""

from pathlib import Path

from instructor.grade.records import Record, write_whole
from shared.checks.engine.display import said_once
from shared.tables.rendering import render


def write(record: Record, folder: Path) -> None:
    """Write feedback/<student>/<lab>.html. What students wrote is shown as text, whatever it looks like."""
    page = render(__package__, "feedback.html", record=record, said_once=said_once, number=_number)
    write_whole(folder / "feedback" / record.student / f"{record.lab}.html", page)


def write_index(records: list[Record], folder: Path) -> None:
    """Write index.html."""
    write_whole(folder / "index.html", render(__package__, "index.html", records=records, number=_number))


def _number(points: float) -> str:
    return f"{points:g}"
