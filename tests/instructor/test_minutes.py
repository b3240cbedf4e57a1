"""The README states the minutes that are computed from the lessons and written in the labs."""

import re

import pytest

from instructor.build import ROOT, chapters
from instructor.start_page import lab_minutes, lesson_minutes

ROWS = {line[2:4]: line for line in (ROOT / "README.md").read_text().splitlines() if re.match(r"\| \d\d \|", line)}


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_readme_states_the_minutes_of_lesson_and_lab(chapter):
    stated = f"| {lesson_minutes(chapter)} + {lab_minutes(chapter)} |"
    assert stated in ROWS[chapter.name[:2]], f"README's row for {chapter.name} should contain {stated!r}"


@pytest.mark.parametrize("chapter", chapters(), ids=lambda chapter: chapter.name)
def test_a_lesson_begins_with_its_minutes(chapter):
    begins = f"**{lesson_minutes(chapter)} minutes.**"
    assert begins in chapter.read("lesson").cells[0].source, f"lesson {chapter.name} should begin with {begins!r}"
