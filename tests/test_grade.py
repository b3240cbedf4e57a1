"""Grading gives every student and lab one row, keeps finished grades, and shows students' text as plain text."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from instructor.grade import __main__ as grade
from instructor.grade import feedback, gradebook, records, sandbox, tasks
from instructor.grade.records import Answer, Record
from shared.checks.engine.verdicts import Verdict
from tests.handed_in import CHAPTERS, hand_in, need_sandbox, writes

LAB = "00_ranks"
ROOT = Path(__file__).parent.parent
REQUIRE = sandbox.require


@pytest.fixture(autouse=True)
def graders_without_a_sandbox(monkeypatch):
    """Most tests here use a grader that runs no student's code."""
    monkeypatch.setattr(sandbox, "require", lambda: None)


def rows(path: Path) -> list[dict]:
    return list(csv.DictReader(path.open(encoding="utf-8")))


def instant(submission, course, limits) -> Record:
    """Grade without a sandbox: every answer is right."""
    digest = records.digest_of(submission, course.digest)
    answers = [Answer(task.number, task.name, task.points, task.points) for task in course.tasks]
    return Record(submission.student, submission.lab, digest, answers)


# -- points


def test_every_graded_cell_of_a_lab_is_a_task_with_checks():
    for chapter in CHAPTERS.values():
        found = tasks.tasks_of(chapter)
        graded = [cell for cell in chapter.read("lab").cells if "check" in cell.metadata.get("tags", [])]
        assert len(found) == len(graded) > 0
        assert sum(task.points for task in found) == sum(cell.metadata["nbgrader"]["points"] for cell in graded)
        exercises = [cell for cell in chapter.read("lab").cells if "exercise" in cell.metadata.get("tags", [])]
        cells = dict.fromkeys(name for task in found for name in task.cells)
        assert list(cells) == [cell.metadata["nbgrader"]["grade_id"] for cell in exercises]


@pytest.mark.parametrize(
    ("passed", "points"),
    [
        ({"values": True, "wire": True, "group": True}, 2.0),
        ({"wire": True, "values": True, "group": False}, 1.33),
        ({"wire": True, "values": False, "group": True}, 0.0),
        ({"situations": True, "ties": False}, 1.0),
        ({"situations": False, "ties": True}, 0.0),
        ({}, 0.0),
    ],
)
def test_points_are_divided_over_checks_and_need_right_values(passed, points):
    assert tasks.credit(2.0, [Verdict("piece", check, ok) for check, ok in passed.items()]) == points


# -- one row each


def test_every_student_has_a_row_and_a_page_whatever_they_handed_in(tmp_path):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    hand_in(handed_in, "anna", LAB)
    (handed_in / "ben").mkdir()
    for student, text in (("cleo", ""), ("dora", '{"cells": [{"cell_ty'), ("eve", "[]")):
        path = hand_in(handed_in, student, LAB).path
        path.write_text(text)
    hand_in(handed_in, "fritz", "01_collectives").path.rename(handed_in / "fritz" / f"{LAB}.ipynb")
    hand_in(handed_in, "Ada", LAB)
    hand_in(handed_in, "ada", LAB)

    def grader(submission, course, limits):
        if submission.student == "anna":
            return instant(submission, course, limits)
        if submission.student == "ada":
            raise ZeroDivisionError("a mistake of the grader")
        return grade.grading.grade(submission, course, limits)

    # The real grader gets only notebooks that fail before any code runs, so no sandbox is started.
    hand_in(handed_in, "Ada", LAB).path.write_text("no notebook")
    graded = grade.grade_all(handed_in, folder, 0, grader=grader)
    book = {row["student"]: row for row in rows(folder / "gradebook.csv")}
    assert (
        list(book)
        == sorted(["Ada", "ada", "anna", "ben", "cleo", "dora", "eve", "fritz"])
        == [r.student for r in graded]
    )
    assert (book["anna"]["points"], book["anna"]["reason"]) == ("15.0", "all checks passed")
    assert book["ben"]["reason"] == "there is no notebook for 00_ranks"
    assert book["cleo"]["reason"] == "the notebook is an empty file"
    assert book["fritz"]["reason"].startswith("the notebook has none of this lab's exercises")
    assert book["ada"]["reason"] == "not graded, run the grader again: ZeroDivisionError: a mistake of the grader"
    assert "ada has the same name except for case or Unicode form" in book["Ada"]["look_at"]
    for student, row in book.items():
        assert row["reason"] and (student == "anna") == (float(row["points"]) > 0)
        assert (folder / row["feedback"]).read_text().count(student)
        assert json.loads((folder / "gradescope" / student / LAB / "results.json").read_text())["output"]


@pytest.mark.exhaustive
def test_a_grader_killed_in_the_middle_of_200_continues_where_it_was(tmp_path):
    handed_in, folder, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    for number in range(200):
        path = handed_in / f"student{number:03d}" / LAB / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(str(number))
    script = f"""
        import pathlib, time
        from instructor.grade import __main__ as grade
        from tests.test_grade import instant
        def grader(submission, course, limits):
            with open({str(log)!r}, "a") as log:
                log.write(submission.student + "\\n")
            time.sleep(0.01)
            return instant(submission, course, limits)
        grade.sandbox.require = lambda: None
        grade.grade_all(pathlib.Path({str(handed_in)!r}), pathlib.Path({str(folder)!r}), 0, grader=grader)
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(80):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: path.read_bytes() for path in (folder / "records").glob("*/*.json")}
    assert 80 <= len(before) < 200
    assert len(rows(folder / "gradebook.csv")) >= 79  # complete, although its writer was killed
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [row["student"] for row in rows(folder / "gradebook.csv")] == [f"student{n:03d}" for n in range(200)]
    assert all((folder / "records" / student / f"{LAB}.json").read_bytes() == kept for student, kept in before.items())
    times = Counter(log.read_text().split())
    assert len(times) == 200 and all(times[student] == 1 for student in before)


def test_only_changed_notebooks_are_graded_again(tmp_path):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    anna, _ = hand_in(handed_in, "anna", LAB), hand_in(handed_in, "ben", LAB)
    graded = []

    def grader(submission, course, limits):
        graded.append(submission.student)
        return instant(submission, course, limits)

    grade.grade_all(handed_in, folder, grader=grader)
    hand_in(handed_in, "anna", LAB, writes(sum_over_ranks="def sum_over_ranks(): pass"))
    records.path_of(folder, "ben", LAB).write_text('{"half a rec')
    grade.grade_all(handed_in, folder, grader=grader)
    grade.grade_all(handed_in, folder, grader=grader)
    assert graded == ["anna", "ben", "anna", "ben"]
    assert anna.path.exists()


def test_two_graders_cannot_write_to_one_folder(tmp_path):
    hand_in(tmp_path / "in", "anna", LAB)
    with grade._locked(tmp_path / "out"), pytest.raises(grade.Usage, match="another grader is writing to"):
        grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)


# -- what is written


def hostile_record() -> Record:
    """Return a record in which every text attacks the program that reads it."""
    script = "<script>alert(1)</script>"
    verdicts = [Verdict("piece", "values", False, (2,), f"came {script}\nsecond line", script)]
    answers = [Answer("0.1", "piece", 0.0, 2.0, verdicts, f"=cmd() {script}")]
    return Record("=1+1 <b>", LAB, "", answers, notes=[script], notices=[f"uses {script}"])


def test_pages_show_students_text_as_plain_text(tmp_path):
    record = hostile_record()
    feedback.write(record, tmp_path)
    feedback.write_index([record], tmp_path)
    page = (tmp_path / "feedback" / record.student / f"{LAB}.html").read_text()
    index = (tmp_path / "index.html").read_text()
    for text in (page, index):
        assert "<script" not in text and "<b>" not in text and "&lt;script&gt;" in text
    assert 'href="feedback/%3D1%2B1%20%3Cb%3E/00_ranks.html"' in index
    assert "uses" not in page, "notices are for the instructor only"


def test_tables_have_no_formulas_and_one_line_per_row(tmp_path):
    gradebook.write([hostile_record()], tmp_path)
    for name in ("gradebook.csv", "exercises.csv"):
        (row,) = rows(tmp_path / name)
        assert not any(value.startswith(("=", "+", "-", "@")) or "\n" in value for value in row.values())
        assert row["student"] == "'=1+1 <b>"


def test_a_table_read_with_semicolons_has_no_formulas_either(tmp_path):
    record = hostile_record()
    record.reason = 'raised ;"=1+1;x and ;=2+2'
    gradebook.write([record], tmp_path)
    with open(tmp_path / "gradebook.csv", newline="") as file:
        cells = [cell for row in csv.reader(file, delimiter=";") for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


def test_a_name_in_an_old_encoding_stops_nobody(tmp_path):
    """A zip file from an old system gives a folder a name that is not valid UTF-8."""
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for name in (b"Jos\xe9", b"zoe"):
        (Path(os.fsdecode(bytes(handed_in) + b"/" + name)) / LAB).mkdir(parents=True)
    hand_in(handed_in, "anna", LAB)
    graded = grade.grade_all(handed_in, folder, 0, grader=instant)
    assert [os.fsencode(record.student) for record in graded] == [b"Jos\xe9", b"anna", b"zoe"]
    assert "zoe" in (folder / "index.html").read_text() and len(rows(folder / "gradebook.csv")) == 3


def test_gradescope_gets_the_points_and_text_of_each_exercise(tmp_path):
    gradebook.write_gradescope(hostile_record(), tmp_path)
    results = json.loads((tmp_path / "gradescope" / "=1+1 <b>" / LAB / "results.json").read_text())
    (test,) = results["tests"]
    assert results["score"] == sum(exercise["score"] for exercise in results["tests"]) == 0
    assert (test["name"], test["max_score"], test["status"], test["output_format"]) == ("piece", 2.0, "failed", "text")
    assert "values" in test["output"] and "second line" in test["output"]


# -- what an instructor types


@pytest.mark.parametrize(
    ("make", "number", "message"),
    [
        (lambda folder: None, None, "there is no folder"),
        (lambda folder: folder.mkdir(), None, "has no folders"),
        (
            lambda folder: (folder / "anna").mkdir(parents=True),
            None,
            r"has a notebook for any of the labs \(00_ranks, .*CHAPTER=04",
        ),
        (lambda folder: (folder / "anna").mkdir(parents=True), 77, "there is no chapter 77; the chapters are 00, 01"),
    ],
)
def test_impossible_requests_are_rejected_with_one_sentence(tmp_path, make, number, message):
    make(tmp_path / "in")
    with pytest.raises(grade.Usage, match=message):
        grade.grade_all(tmp_path / "in", tmp_path / "out", number, grader=instant)


def test_nothing_runs_without_bubblewrap(tmp_path, monkeypatch):
    hand_in(tmp_path / "in", "anna", LAB)
    monkeypatch.setattr(sandbox, "require", REQUIRE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sandbox.NoSandbox, match="apt-get install bubblewrap"):
        grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)


@pytest.mark.exhaustive
def test_make_grade_grades(tmp_path, monkeypatch):
    """Run the command that an instructor types, with a right and a wrong submission."""
    monkeypatch.setattr(sandbox, "require", REQUIRE)
    need_sandbox()
    hand_in(tmp_path / "in", "anna", LAB)
    wrong = "%%ranks\ndef sum_over_ranks(number):\n    return number"
    hand_in(tmp_path / "in", "ben", LAB, writes(sum_over_ranks=wrong))
    command = [
        sys.executable,
        "-m",
        "instructor.grade",
        str(tmp_path / "in"),
        "--chapter",
        "0",
        "--into",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    anna, ben = rows(tmp_path / "out" / "gradebook.csv")
    assert (anna["points"], anna["reason"], anna["look_at"]) == ("15.0", "all checks passed", "")
    assert (ben["points"], ben["reason"]) == ("13.0", "0.1 sum_over_ranks: failed: values, wire")
    page = (tmp_path / "out" / ben["feedback"]).read_text()
    assert "✗ failed" in page and "✓ passed" in page and 'class="hint"' in page
    assert [row["number"] for row in rows(tmp_path / "out" / "exercises.csv")] == [f"0.{n}" for n in range(1, 6)] * 2
