"""Compute how long a lesson takes to read. A lab states its own minutes."""

import re

from instructor.build import Chapter

WORDS_PER_MINUTE = 200
SECONDS_PER_CODE_LINE = 4
SECONDS_PER_PREDICTION = 30


def lesson_minutes(chapter: Chapter) -> int:
    """Compute a lesson's minutes from its words, its lines of code and its predictions."""
    cells = chapter.read("lesson").cells
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    seconds = SECONDS_PER_CODE_LINE * len(lines) + SECONDS_PER_PREDICTION * prose.count("**Predict.**")
    return round(len(re.findall(r"\w+", prose)) / WORDS_PER_MINUTE + seconds / 60)


def lab_minutes(chapter: Chapter) -> int:
    """Read a lab's minutes from the head of its source."""
    return chapter.read("lab").metadata["course"]["minutes"]
