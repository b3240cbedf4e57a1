"""Estimate how long a lesson takes to read. A lab states its own minutes."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from instructor.build import Chapter

WORDS_PER_MINUTE = 130
SECONDS_PER_CODE_LINE = 12
SECONDS_PER_PICTURE = 20  # a figure or a table
SECONDS_PER_PREDICTION = 45
# Readers of all lessons estimated 72 to 106% of the sum of these numbers, 86% on average. Nobody has been timed yet.
FASTEST, SLOWEST = 0.70, 1.05
_SHOWS = re.compile(r"^(?:\w*plots\.|tables\.|diagrams\.|widgets\.|\w+$)")  # the last line of a cell with a picture


@dataclass(frozen=True)
class Minutes:
    """A range, printed as 45–65, or as one number if both ends are equal."""

    fastest: int
    slowest: int

    def __str__(self) -> str:
        return "–".join(map(str, sorted({self.fastest, self.slowest})))


def lesson_minutes(chapter: Chapter) -> Minutes:
    """Estimate a lesson's minutes from its words, its lines of code, its figures and tables, and its predictions.

    If readers disagree with the estimate, the head of the lesson's source says what they need.
    """
    lesson = chapter.read("lesson")
    if stated := lesson.metadata["course"].get("minutes"):
        return Minutes(*stated)
    cells = [cell for cell in lesson.cells if "claims" not in cell.metadata.get("tags", [])]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    codes = [cell.source for cell in cells if cell.cell_type == "code"]
    lines = [line for code in codes for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pictures = sum(bool(_SHOWS.match(code.splitlines()[-1])) for code in codes if code) + prose.count("\n|---")
    seconds = 60 * len(re.findall(r"\w+", prose)) / WORDS_PER_MINUTE + SECONDS_PER_CODE_LINE * len(lines)
    seconds += SECONDS_PER_PICTURE * pictures + SECONDS_PER_PREDICTION * prose.count("**Predict.**")
    return Minutes(*(5 * round(share * seconds / 300) for share in (FASTEST, SLOWEST)))


def lab_minutes(chapter: Chapter) -> int:
    """Read a lab's minutes from the head of its source."""
    return chapter.read("lab").metadata["course"]["minutes"]


def together(ranges: Iterable[Minutes]) -> Minutes:
    ranges = list(ranges)
    return Minutes(sum(each.fastest for each in ranges), sum(each.slowest for each in ranges))
