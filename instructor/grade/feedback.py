"""A page per student and lab, with each verdict and its hint; and a page for the instructor that leads to them all."""

from pathlib import Path
from urllib.parse import quote

import jinja2

from instructor.grade.records import Record, write_whole
from shared.checks.engine.display import said_once

_PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "pages"),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
_PAGES.filters |= {"quote": quote, "said_once": said_once, "number": lambda value: f"{value:g}"}


def write(record: Record, folder: Path) -> None:
    """Write feedback/<student>/<lab>.html. What students wrote is shown as text, whatever it looks like."""
    page = _PAGES.get_template("feedback.html").render(record=record)
    write_whole(folder / "feedback" / record.student / f"{record.lab}.html", page)


def write_index(records: list[Record], folder: Path) -> None:
    page = _PAGES.get_template("index.html").render(records=records)
    write_whole(folder / "index.html", page)
