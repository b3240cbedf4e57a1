"""`make chapter` begins a chapter that builds, checks and passes its tests, or says in one sentence why it cannot."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from instructor import contents, new_chapter
from instructor.new_chapter import CannotBegin, Plan, planned, with_entry, with_row

ROOT = Path(__file__).parents[2]
FREE = max(contents.CHAPTERS) + 1
TOY = f"{FREE}_toy"
# The tests that run for every chapter. The copy has no others, because collecting them would take too long.
OF_CHAPTERS = ("test_build.py", "test_labs.py", "test_minutes.py", "test_mutants.py")


@pytest.fixture
def course(tmp_path) -> Path:
    """Copy the course without its chapters, so that a chapter can be begun in the copy."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        inside = Path(folder).relative_to(ROOT).as_posix()
        if inside == ".":
            return {name for name in names if name.startswith(".") and name != ".ci"} | {"build", "chapters", "labs"}
        if inside in ("source", "tests/mutants", "tests/variants"):
            return {name for name in names if name[:2].isdigit()}
        if inside.startswith("tests"):
            names = [name for name in names if name not in OF_CHAPTERS]
            return {name for name in names if name.startswith("test_") or name == "__pycache__"}
        return {name for name in names if name.endswith(".ipynb") or name == "__pycache__"}

    copy = tmp_path / "course"
    shutil.copytree(ROOT, copy, ignore=left_out)
    for folder in ("chapters", "labs"):
        (copy / folder).mkdir()
    return copy


def run(course: Path, *command: str) -> str:
    """Run a command in a copy of the course. If it fails, the test fails with its output."""
    environment = {**os.environ, "PYTHONPATH": str(course)}
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_a_chapter_made_by_make_chapter_builds_and_passes_its_tests(course):
    make = ("make", "--no-print-directory", f"COURSE_PYTHON={sys.executable}")
    printed = run(course, *make, "chapter", f"NAME={TOY}", "TITLE=A toy")
    assert f"wrote source/{TOY}/lesson.py" in printed and f"make test CHAPTER={FREE}" in printed
    lesson, readme = (course / "source" / TOY / "lesson.py").read_text(), (course / "README.md").read_text()
    stated = re.search(r"^# \*\*([\d–]+) minutes\.\*\*", lesson, re.MULTILINE)[1]
    assert f"(labs/{TOY}_lab.ipynb) | {stated} + " in readme
    run(course, *make, "notebooks")
    assert (course / "solutions" / "toy.py").exists()
    lines = run(course, *make, "test", f"CHAPTER={FREE}").splitlines()
    assert [line.split()[0] for line in lines if line.endswith(" passed")] == ["lint", "unit", "notebooks"], lines
    assert [TOY, "1", "/", "1", "1", "/", "1"] in [line.split()[:7] for line in lines]
    assert lines[-1].endswith(" passed, 0 failed")


@pytest.mark.parametrize(
    ("name", "title", "module", "message"),
    [
        ("", "A toy", "", "NAME must be two digits and a name in lower case"),
        ("3_toy", "A toy", "", "NAME must be two digits and a name in lower case, .* got '3_toy'"),
        (f"{FREE}_Toy", "A toy", "", "NAME must be two digits"),
        (f"{FREE}_toy-model", "A toy", "", "NAME must be two digits"),
        (f"{FREE}_{'toy' * 30}", "A toy", "", "at most 60 characters"),
        ("02_manual_ddp", "Data parallelism by hand", "", "Chapter 02_manual_ddp already exists"),
        ("02_toy", "A toy", "", "Number 02 is taken by chapter 02_manual_ddp"),
        (f"{FREE}_manual_ddp", "A toy", "", "The name manual_ddp is taken by chapter 02_manual_ddp"),
        (
            f"{FREE}_beyond_one_machine",
            "A toy",
            "",
            "instructor/contents.py plans the name beyond_one_machine for chapter 20_beyond_one_machine",
        ),
        ("20_toy", "A toy", "", 'Chapter 20 is planned as NAME=20_beyond_one_machine TITLE="Beyond one machine"'),
        ("20_beyond_one_machine", "A toy", "", "Chapter 20 is planned as"),
        (TOY, "", "", "A chapter needs a title: add TITLE="),
        (TOY, "A [toy]", "", "TITLE may have at most 60 characters, and none of"),
        (TOY, "A toy\nand more", "", "TITLE may have"),
        (TOY, "A toy " * 20, "", "TITLE may have at most 60 characters"),
        (TOY, "A toy", "zero1", "The module zero1 is built by chapter 07_zero1"),
        (TOY, "A toy", "train", r"solutions/train\.py already exists: choose another module"),
        (TOY, "A toy", "engine", "shared/checks/engine already exists: choose another module"),
        (TOY, "A toy", "a toy", "'a toy' cannot be the name of a Python module"),
        (f"{FREE}_3d", "A toy", "", "'3d' cannot be the name of a Python module: choose one with MODULE="),
        (f"{FREE}_lambda", "A toy", "", "'lambda' cannot be the name of a Python module"),
    ],
)
def test_wrong_arguments_are_rejected_in_one_sentence_and_nothing_is_written(
    monkeypatch, capsys, name, title, module, message
):
    with pytest.raises(CannotBegin, match=message) as reason:
        planned(name, title, module)
    monkeypatch.setattr(sys, "argv", ["new_chapter", name, title, "--module", module])
    monkeypatch.setattr(new_chapter, "begin", lambda plan: pytest.fail("begin() was called"))
    assert new_chapter.main() == 2
    assert capsys.readouterr().err == f"{reason.value}\n"


def test_existing_files_are_not_overwritten(monkeypatch, tmp_path):
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    (tmp_path / "tests" / "mutants" / f"{TOY}.toml").touch()
    monkeypatch.setattr(new_chapter, "ROOT", tmp_path)
    with pytest.raises(CannotBegin, match=rf"^tests/mutants/{TOY}\.toml already exists: "):
        planned(TOY, "A toy")


# -- the two lists

README = """\
| | lesson | lab | minutes | solution |
|---|---|---|---|---|
| | **One** | | | |
| 02 | [Two](chapters/02_two.ipynb) | [two](labs/02_two_lab.ipynb) | 30 + 60 | [02](solutions/02_two_solution.ipynb) |
| | **Other** | *to come:* 13 three, 15 five, 17 seven | | |
| 16 | [Six](chapters/16_six.ipynb) | [six](labs/16_six_lab.ipynb) | 30 + 60 | [16](solutions/16_six_solution.ipynb) |

| 01 | another table |
"""


@pytest.mark.parametrize(
    ("number", "above", "to_come"),
    [
        (13, "| | **Other** |", "*to come:* 15 five, 17 seven |"),
        (15, "| | **Other** |", "*to come:* 13 three, 17 seven |"),
        (17, "| 16 |", "*to come:* 13 three, 15 five |"),
        (3, "| 02 |", "*to come:* 13 three, 15 five, 17 seven |"),
    ],
)
def test_the_readme_gets_a_row_in_the_right_place(number, above, to_come):
    lines = with_row(README, Plan(number, "new", "New", "new"), "5 + 15").splitlines()
    row = f"| {number:02d} | [New](chapters/{number:02d}_new.ipynb) | "
    row += f"[*to be written*](labs/{number:02d}_new_lab.ipynb) | 5 + 15 | "
    row += f"[{number:02d}](solutions/{number:02d}_new_solution.ipynb) |"
    assert lines[lines.index(row) - 1].startswith(above)
    assert any(to_come in line for line in lines) and len(lines) == len(README.splitlines()) + 1


def test_the_list_of_chapters_to_come_disappears_with_its_last_entry():
    text = "| | **Other** | *to come:* 13 three | | |\n"
    assert with_row(text, Plan(13, "new", "New", "new"), "").startswith("| | **Other** | | | |\n| 13 |")


def test_the_contents_get_an_entry_unless_the_chapter_is_planned():
    text = (ROOT / new_chapter.CONTENTS).read_text()
    names = {}
    exec(with_entry(text, Plan(FREE, "toy", "A toy", "toy")), names)
    assert list(names["CHAPTERS"]) == [*contents.CHAPTERS, FREE]
    assert names["CHAPTERS"][FREE].title == "A toy"
    assert with_entry(text, Plan(20, "beyond_one_machine", "Beyond one machine", "beyond_one_machine")) == text
