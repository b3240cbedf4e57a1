"""Every link in the course has a target. Nothing is downloaded; test_release.py does the same for each bundle.

The tests read Markdown files and the Markdown cells of lessons, labs and solutions, where a reader can click on links.
For the course as a whole, they also look up paths in backticks, such as `labs/simple_ddp.py`.
"""

import re
from pathlib import Path

import pytest

from tests.links import broken, links, markdown_of, tokens

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "chapters", "instructor", "labs", "shared", "solutions")  # that contain Markdown
PATHS = re.compile(r"(?:benchmarks|chapters|instructor|labs|shared|solutions|source|tests)/[\w/.-]*\w")


@pytest.fixture(scope="module")
def course() -> dict[str, str]:
    """Return the text of every Markdown file and notebook by its path."""
    paths = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    return {p.relative_to(ROOT).as_posix(): p.read_text() for p in paths if p.suffix in (".md", ".ipynb")}


def test_every_link_of_the_course_has_a_target(course):
    assert sum(1 for name, text in course.items() for _ in links(markdown_of(name, text))) > 30
    assert broken(course, lambda target: (ROOT / target).exists()) == []


def test_every_path_in_backticks_exists(course):
    """Placeholders such as `tests/mutants/NN_name/` are not checked."""
    mentioned = {
        (name, path)
        for name, text in course.items()
        for token in tokens(markdown_of(name, text))
        if token.type == "code_inline"
        for path in PATHS.findall(token.content)
        if "NN" not in path
    }
    assert len(mentioned) > 5
    assert [f"{name}: {path}" for name, path in sorted(mentioned) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](labs/none.ipynb)", ["README.md: labs/none.ipynb"]),
        ("![a](none.png)", ["README.md: none.png"]),
        ("[a](../outside.md)", ["README.md: ../outside.md"]),
        ("# One title\n[a](#two)", ["README.md: #two"]),
        ("# One title: `x`\n[a](#one-title-x) [b](labs/one.ipynb) [c](https://example.org/none)", []),
        ("`[a](none.md)`\n\n```\n[a](none.md)\n```", []),
    ],
)
def test_broken_links_are_named(text, expected):
    assert broken({"README.md": text}, {"README.md", "labs/one.ipynb"}.__contains__) == expected
