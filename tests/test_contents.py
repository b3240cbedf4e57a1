"""Every reference to a chapter or an exercise is right, and the table of contents matches the chapters."""

import re
from pathlib import Path

import pytest

from instructor.build import chapters
from instructor.contents import CHAPTERS, wrong_references
from tests import links

ROOT = Path(__file__).parent.parent
FOLDERS = ("benchmarks", "docs", "instructor", "labs", "shared", "solutions", "source")
FOLDERS += ("tests/mutants", "tests/variants")
HEADING = re.compile(r"^# ## Exercise (\d+\.\d+) · ", re.MULTILINE)


def texts() -> list[Path]:
    found = [
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".toml")
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found]


def exercises() -> set[str]:
    return {number for chapter in chapters() for number in HEADING.findall((chapter.folder / "lab.py").read_text())}


def test_every_chapter_is_in_the_contents_with_its_number_name_and_title():
    planned = {chapter.folder: chapter.title for chapter in CHAPTERS.values()}
    for chapter in chapters():
        title = re.search(r"^# # (\d\d) · (.+)$", (chapter.folder / "lesson.py").read_text(), re.MULTILINE)
        assert planned.get(chapter.name) == title[2] and title[1] == chapter.name[:2]


def test_exercises_are_numbered_by_their_chapter():
    for chapter in chapters():
        numbers = HEADING.findall((chapter.folder / "lab.py").read_text())
        assert numbers == [f"{int(chapter.name[:2])}.{index}" for index in range(1, len(numbers) + 1)]


def test_the_readme_has_the_chapters_of_the_contents():
    row = re.compile(r"^\| (\d\d) \| \[(.+?)]\(chapters/(\w+)\.ipynb\)", re.MULTILINE)
    rows = row.findall((ROOT / "README.md").read_text())
    assert [folder for _, _, folder in rows] == [chapter.name for chapter in chapters()]
    planned = [CHAPTERS[int(number)] for number, _, _ in rows]
    assert [(title, folder) for _, title, folder in rows] == [(chapter.title, chapter.folder) for chapter in planned]


def test_no_link_of_a_page_is_broken():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    pages = {path.relative_to(ROOT).as_posix(): path.read_text() for path in pages}
    assert links.broken(pages, lambda target: (ROOT / target).exists()) == []


def test_every_reference_is_right():
    known = exercises()
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in texts()
        if (found := list(wrong_references(path.read_text(), known)))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("as in chapter 21", "there is no chapter 21"),
        ("as in chapter\n# 21", "there is no chapter 21"),
        ("(chapters 06 to 33)", "there is no chapter 33"),
        ("Lab 99's queue", "there is no chapter 99"),
        ("see chapter 7", "there is no chapter 7"),
        ("chapter 07 (zero2)", "chapter 07 is zero1"),
        ("Chapter 07 · ZeRO-2", "chapter 07 is 'ZeRO-1'"),
        ("exercises 7.1 and 7.9", "there is no exercise 7.9"),
    ],
)
def test_a_wrong_reference_is_found(text, message):
    (found,) = wrong_references(text, {"7.1", "7.2"})
    assert found.endswith(message)


@pytest.mark.parametrize(
    "text",
    ["chapter 07 (zero1)", "chapter 07 · ZeRO-1", "Lab 00 · First collectives", "chapters 04, 19", "exercise 7.2"],
)
def test_a_right_reference_is_accepted(text):
    assert list(wrong_references(text, {"7.1", "7.2"})) == []
