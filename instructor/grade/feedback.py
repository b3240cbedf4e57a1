"""Write a page per student and lab with every verdict and hint, and an index page for the instructor."""

import os
import urllib.parse
from pathlib import Path

from instructor.grade.policy import undated
from instructor.grade.records import UNANSWERED, Record, counted, notebook_of, write_whole
from instructor.grade.tasks import essential_of
from shared.checks.engine.display import shorten_repeated_evidence, sign
from shared.tables import render


def write(record: Record, folder: Path) -> None:
    """Write feedback/<student>/<lab>.html. Everything that a student wrote is escaped and shown as text."""
    page = render(
        __package__,
        "feedback.html",
        record=record,
        shorten_repeated_evidence=shorten_repeated_evidence,
        sign=sign,
        points=_points,
        counted=counted,
        notebook_of=notebook_of,
        numbered=_numbered,
        essential_of=essential_of,
        unanswered=UNANSWERED,
    )
    write_whole(folder / "feedback" / record.student / f"{record.lab}.html", page)


def write_index(records: list[Record], folder: Path, complete: bool = True, anonymous: bool = False) -> None:
    """Write index.html, an overview of all records.

    Args:
        complete: False while grading goes on.
        anonymous: Whether the students' names are codes. If so, the page lacks what only the instructor should see.
    """
    page = render(
        __package__,
        "index.html",
        records=records,
        students=len({record.student for record in records}),
        points=_points,
        quoted=_quoted,
        undated=undated(records),
        complete=complete,
        anonymous=anonymous,
    )
    write_whole(folder / "index.html", page)


def _quoted(name: str) -> str:
    """Quote a folder's name for a link. The name may come from an old system and not be valid UTF-8."""
    return urllib.parse.quote(os.fsencode(name), safe="")


def _numbered(code: str) -> list[tuple[int, str]]:
    """Return the lines of some code with their numbers, from the first one that is not empty."""
    empty = len(code) - len(code.lstrip("\n"))
    return list(enumerate(code.split("\n"), 1))[empty:]


def _points(points: float) -> str:
    return f"{points:g}"
