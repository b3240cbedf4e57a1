"""Every link leads somewhere, or is named. Nothing is fetched; test_release.py asks the same of each bundle.

Read are Markdown files, and the Markdown cells of lessons, labs and solutions: what a reader can click on. A path in
backticks, `labs/simple_ddp.py` for one, is looked up too, for the course as a whole.
"""

import re
from pathlib import Path

import pytest

from tests.links import broken, links, markdown_of, tokens

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "chapters", "instructor", "labs", "shared", "solutions")  # with texts to read
PLACES = re.compile(r"(?:benchmarks|chapters|instructor|labs|shared|solutions|source|tests)/[\w/.-]*\w")


@pytest.fixture(scope="module")
def course() -> dict[str, str]:
    """→ what there is to read, by its path"""
    paths = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in paths if p.suffix in (".md", ".ipynb")}


def test_every_link_of_the_course_leads_somewhere(course):
    assert sum(1 for name, text in course.items() for _ in links(markdown_of(name, text))) > 30
    assert broken(course, lambda target: (ROOT / target).exists()) == []


def test_every_path_in_backticks_is_there(course):
    """Placeholders, `tests/mutants/NN_name/` for one, are none."""
    named = {
        (name, place)
        for name, text in course.items()
        for token in tokens(markdown_of(name, text))
        if token.type == "code_inline"
        for place in PLACES.findall(token.content)
        if "NN" not in place
    }
    assert len(named) > 5
    assert [f"{name}: {place}" for name, place in sorted(named) if not (ROOT / place).exists()] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](labs/none.ipynb)", ["README.md: labs/none.ipynb"]),
        ("![a](none.png)", ["README.md: none.png"]),
        ("[a](../outside.md)", ["README.md: ../outside.md"]),
        ("# One title\n[a](#two)", ["README.md: #two"]),
        ("# One title: `x`\n[a](#one-title-x) [b](labs/one.ipynb) [c](https://example.org/none)", []),
        ("`[a](none.md)`\n\n```\n[a](none.md)\n```", []),
    ],
)
def test_a_link_that_leads_nowhere_is_named(text, said):
    assert broken({"README.md": text}, {"README.md", "labs/one.ipynb"}.__contains__) == said
