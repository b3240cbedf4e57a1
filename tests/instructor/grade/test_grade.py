"""Grading gives every student and lab one row, keeps finished grades, and shows students' text as plain text."""

import contextlib
import csv
import errno
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from instructor import release
from instructor.grade import command as grade
from instructor.grade import (
    course,
    drawing,
    finding,
    gradebook,
    grading,
    machine_load,
    policy,
    records,
    sandbox,
    submissions,
    tasks,
)
from instructor.grade.drawing import DrawnSizes, GradingRunner
from instructor.grade.limits import Limits
from instructor.grade.outputs import Outputs, write_index, write_page
from instructor.grade.policy import Policy
from instructor.grade.records import Answer, Record
from shared import deadlines
from shared.checks.engine import attempts, failures, folders
from shared.checks.engine.sizes import models_of
from shared.checks.engine.verdicts import Verdict
from shared.checks.models import awkward
from shared.ranks.diagnosis import CellState
from shared.ranks.errors import CellFailed
from tests.handed_in import CHAPTERS, cells_of, hand_in, need_sandbox, writes

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("unpacked_once")]

LAB = "00_ranks"
ROOT = Path(__file__).parents[3]
REQUIRE = sandbox.require


@pytest.fixture(autouse=True)
def graders_without_a_sandbox(monkeypatch):
    """Most tests here use a grader that runs no student's code."""
    monkeypatch.setattr(sandbox, "require", lambda: None)


def rows(path: Path) -> list[dict]:
    return list(csv.DictReader(path.open(encoding="utf-8-sig")))


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


def test_every_student_has_a_row_and_a_page_whatever_they_handed_in(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "require", REQUIRE)
    need_sandbox()
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

    # The real grader gets only notebooks that fail before any code runs.
    hand_in(handed_in, "Ada", LAB).path.write_text("no notebook")
    graded = grade.grade_all(handed_in, folder, grade.Request(0), grader=grader)
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
    assert book["ada"]["reason"] == "not graded, so run the grader again: ZeroDivisionError: a mistake of the grader"
    assert "ada has the same name except for case or Unicode form" in book["Ada"]["look_at"]
    for student, row in book.items():
        assert row["reason"] and (student == "anna") == (float(row["points"]) > 0)
        assert (folder / row["feedback"]).read_text().count(student)
        assert json.loads((folder / "gradescope" / student / LAB / "results.json").read_text())["output"]


def test_a_grader_killed_in_the_middle_of_50_continues_where_it_was(tmp_path):
    handed_in, folder, log = tmp_path / "in", tmp_path / "out", tmp_path / "log"
    for number in range(50):
        path = handed_in / f"student{number:02d}" / LAB / f"{LAB}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(str(number))
    script = f"""
        import pathlib, time
        from instructor.grade import command as grade
        from tests.instructor.grade.test_grade import instant
        def grader(submission, course, limits):
            with open({str(log)!r}, "a") as log:
                log.write(submission.student + "\\n")
            time.sleep(0.01)
            return instant(submission, course, limits)
        grade.sandbox.require = lambda: None
        folders = pathlib.Path({str(handed_in)!r}), pathlib.Path({str(folder)!r})
        grade.grade_all(*folders, grade.Request(0), grader=grader)
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        assert process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = {path.parent.name: path.read_bytes() for path in (folder / "records").glob("*/*.json")}
    assert 20 <= len(before) < 50
    assert len(rows(folder / "gradebook.csv")) >= 19  # complete, although its writer was killed
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert [row["student"] for row in rows(folder / "gradebook.csv")] == [f"student{n:02d}" for n in range(50)]
    assert all((folder / "records" / student / f"{LAB}.json").read_bytes() == kept for student, kept in before.items())
    times = Counter(log.read_text().split())
    assert len(times) == 50 and all(times[student] == 1 for student in before)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_what_is_graded_and_prints_no_traceback(tmp_path, times):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for number in range(20):
        hand_in(handed_in, f"student{number:02d}", LAB)
    script = f"""
        import sys, time
        from instructor.grade import command as grade
        from tests.instructor.grade.test_grade import instant
        def grader(submission, course, limits):
            for _ in range(10):
                if grade.sandbox.stopping.wait(0.1):
                    raise grade.grading.NotGraded(grade.sandbox.STOPPED)
            return instant(submission, course, limits)
        grade.sandbox.require = lambda: None
        grade.grade_all.__defaults__ = (*grade.grade_all.__defaults__[:-1], grader)
        sys.argv = ["grade", {str(handed_in)!r}, "--into", {str(folder)!r}, "--jobs", "1"]
        sys.exit(grade.main())
        """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("student00")
    process.send_signal(signal.SIGINT)
    printed = ""
    while "Press Ctrl-C again" not in printed:
        printed += process.stdout.readline()
    if times == 2:
        process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=deadlines.scaled(60))
    assert process.returncode == 130 and "Run the same command again" in rest and errors == ""
    saved = len(list((folder / "records").glob("*/*.json")))
    assert saved == len(rows(folder / "gradebook.csv")) and 1 <= saved <= 4


def test_ctrl_c_during_the_first_seconds_prints_no_traceback(tmp_path):
    command = [sys.executable, "-v", "-m", "instructor.grade", str(tmp_path)]  # -v prints each file that is imported.
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while "/torch/" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=deadlines.scaled(60))
    assert process.returncode == -signal.SIGINT and "Traceback" not in printed


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


def test_only_what_verdicts_depend_on_makes_everybodys_work_be_graded_again(monkeypatch):
    """A new word in README.md once had every submission graded again, which takes hours."""
    bundle, (lab, *_) = release.bundle(0), CHAPTERS.values()

    def digest(change=None) -> str:
        monkeypatch.setattr(release, "bundle", lambda number: bundle | (change or {}))
        return course.digest_of(lab, course.files_of(lab))

    before = digest()
    assert before == digest({"README.md": b"x", "chapters/glossary.md": b"x", f"labs/{LAB}_lab.ipynb": b"{}"})
    assert before != digest({"shared/checks/engine/compare.py": b"x"})
    assert before != digest({"solutions/models.py": b"x"})
    read = type(lab).read

    def with_other_given_code(self, kind):
        notebook = read(self, kind)
        if (self, kind) != (lab, "lab"):
            return notebook
        next(cell for cell in notebook.cells if "export" in cell.metadata.get("tags", [])).source += "\nx = 1"
        return notebook

    monkeypatch.setattr(type(lab), "read", with_other_given_code)
    assert before != digest()


def test_one_student_or_one_exercise_can_be_graded_again(tmp_path):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for student in ("anna", "ben"):
        hand_in(handed_in, student, LAB)
    graded = []

    def grader(submission, course, limits, known=()):
        graded.append((submission.student, [answer.number for answer in known]))
        return instant(submission, course, limits)

    grade.grade_all(handed_in, folder, grader=grader)
    hand_in(handed_in, "carl", LAB)
    rows_of = {r.student for r in grade.grade_all(handed_in, folder, grade.Request(students=("ben",)), grader=grader)}
    assert rows_of == {"anna", "ben"}
    grade.grade_all(handed_in, folder, grade.Request(students=("ben",), exercise="0.2"), grader=grader)
    assert graded == [("anna", []), ("ben", []), ("ben", []), ("ben", ["0.1", "0.3", "0.4", "0.5"])]


def test_one_exercise_again_keeps_notices_and_never_mixes_two_notebooks(tmp_path):
    """The others' verdicts of an earlier notebook were once kept for a new one, and never judged again."""
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    hand_in(handed_in, "anna", LAB)
    hand_in(handed_in, "anna", "01_collectives")
    graded = []

    def grader(submission, course, limits, known=()):
        graded.append((submission.lab, len(known)))
        record = instant(submission, course, limits)
        record.notebook = records.digest_of(submission, "")
        record.notices = [] if known else ["uses gc"]
        return record

    grade.grade_all(handed_in, folder, grader=grader)
    one, other = grade.grade_all(handed_in, folder, grade.Request(exercise="0.2"), grader=grader)
    assert graded[2:] == [(LAB, 4)] and one.notices == other.notices == ["uses gc"]
    hand_in(handed_in, "anna", LAB, writes(sum_over_ranks="def sum_over_ranks(): pass"))
    grade.grade_all(handed_in, folder, grade.Request(exercise="0.2"), grader=grader)
    assert graded[3:] == [(LAB, 0)]


def test_wrong_names_are_not_ignored(tmp_path, capsys):
    """A typing error in overrides.csv once changed nothing, and nobody was told."""
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for student in ("anna", "=1+1"):
        hand_in(handed_in, student, LAB)
    for request, message in (
        (grade.Request(students=("Anne",)), "has no student 'Anne'; similar names are 'anna'"),
        (grade.Request(exercise="0.9"), r"there is no exercise '0.9'; the exercises are 0.1, 0.2"),
    ):
        with pytest.raises(grade.Usage, match=message):
            grade.grade_all(handed_in, folder, request, grader=instant)
    rows_by_hand = ("anna,0.2,1,", "'=1+1,0.1,0.5,as in the tables", "ana,0.1,0,", "anna,0.9,0,", "anna,7.1,0,")
    (folder).mkdir(exist_ok=True)
    (folder / "overrides.csv").write_text("student,exercise,points,comment\n" + "\n".join(rows_by_hand) + "\n")
    (handed_in / "course.toml").write_text(f'[labs.{LAB}]\nbonus = ["0.5", "5"]\n')
    hostile, anna = grade.grade_all(handed_in, folder, grader=instant)
    assert (hostile.points, anna.points) == (13.5, 13.0) and "(1 point by hand)" in anna.why
    without_effect = [line for line in capsys.readouterr().out.splitlines() if line.endswith("no effect.")]
    assert without_effect == [
        "overrides.csv names the student 'ana', who does not exist, so this has no effect.",
        "overrides.csv names the exercise '0.9', which does not exist, so this has no effect.",
        f"The bonus exercise '5' of {LAB} in course.toml does not exist, so this has no effect.",
    ]


def test_more_points_by_hand_than_an_exercise_has_count_and_are_reported(tmp_path, capsys):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    hand_in(handed_in, "anna", LAB)
    folder.mkdir()
    (folder / "overrides.csv").write_text("student,exercise,points,comment\nanna,0.1,5,\nanna,0.2,2,\n")
    (record,) = grade.grade_all(handed_in, folder, grader=instant)
    assert record.points == 15 + 3 - 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "overrides.csv: anna gets 5 points for exercise 0.1, which has a maximum of 2."


def test_decisions_by_hand_survive_every_run_and_are_shown(tmp_path):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    hand_in(handed_in, "anna", LAB)
    grade.grade_all(handed_in, folder, grader=instant)
    decisions = "student,exercise,points,comment\nanna,0.1,0.5,copied\nanna,0.2,,well written\n"
    (folder / "overrides.csv").write_text(decisions)
    for _ in range(2):
        (record,) = grade.grade_all(handed_in, folder, grader=instant)
    assert record.points == 13.5 and "0.5 points by hand: copied" in record.why
    page = (folder / "feedback" / "anna" / f"{LAB}.html").read_text()
    assert "Your instructor decided on 0.5" in page and "well written" in page
    assert (folder / "overrides.csv").read_text() == decisions
    assert rows(folder / "exercises.csv")[1]["comment"] == "well written"
    assert records.load(folder, "anna", LAB).points == 15, "the record keeps what the checks found"


COURSE = f"""
[late]
percent_per_day = 10
days = 3
grace_minutes = 15
[labs.{LAB}]
deadline = 2026-11-30T23:59:00+01:00
weight = 3
bonus = ["0.5"]
"""


@pytest.mark.parametrize(
    ("handed_in_at", "points"),
    [
        ("2026-11-30 22:00:00.000000 UTC", 15.0),
        ("2026-12-01T00:10:00+01:00", 15.0),
        ("2026-12-01 00:20:00", 13.5),
        ("2026-12-03T12:00:00+01:00", 10.5),
        ("2026-12-08T12:00:00+01:00", 0.0),
        ("no date", 15.0),
    ],
)
def test_the_course_says_what_a_late_submission_loses(tmp_path, handed_in_at, points):
    handed_in = tmp_path / "in"
    submission = hand_in(handed_in, "anna", LAB)
    (submission.path.parent / "timestamp.txt").write_text(handed_in_at)
    (handed_in / "course.toml").write_text(COURSE)
    (record,) = grade.grade_all(handed_in, tmp_path / "out", grader=instant)
    assert (record.points, record.max_points) == (points, 12.0), "3 of the 15 points are a bonus"
    assert bool(record.late) == (points < 15) and record.undated == (handed_in_at == "no date")


def test_submissions_without_a_date_are_told_in_one_line(tmp_path, capsys):
    """A notice for each of them once hid the other notices."""
    handed_in, students = tmp_path / "in", [f"student {number}" for number in range(1, 8)]
    for student in students:
        hand_in(handed_in, student, LAB)
    (handed_in / "course.toml").write_text(COURSE)
    found = grade.grade_all(handed_in, tmp_path / "out", grader=instant)
    assert not any(record.notices for record in found)
    page = (tmp_path / "out" / "index.html").read_text()
    shown = {page: f"{', '.join(students)}."}
    shown[capsys.readouterr().out] = f"{', '.join(students[:5])} and 2 more, which index.html lists."
    for text, names in shown.items():
        assert text.count("It is unknown whether these submissions were late, because") == 1 and f": {names}" in text


def test_the_terminal_shows_the_points_that_count_and_how_many_are_graded(tmp_path, capsys):
    handed_in = tmp_path / "in"
    for student in ("anna", "ben"):
        submission = hand_in(handed_in, student, LAB)
        (submission.path.parent / "timestamp.txt").write_text("2026-12-01 00:20:00")
    (handed_in / "course.toml").write_text(COURSE)
    grade.grade_all(handed_in, tmp_path / "out", grader=instant)
    late = "13.5/12  1 day late, so 90% of the points count"
    lines = [f"{student}  {LAB}  {late}  (0 s, {number} of 2)" for number, student in enumerate(("anna", "ben"), 1)]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_late_submission_s_page_shows_the_points_before_the_deduction(tmp_path):
    answers = [Answer("0.1", "x", 8.0, 10.0)]
    record = Record("anna", LAB, "", answers, late="1 day late, so 90% of the points count", deducted=0.8)
    write_page(record, tmp_path)
    page = (tmp_path / "feedback" / "anna" / f"{LAB}.html").read_text()
    assert "anna: 7.2 of 10 points" in page
    assert "handed in 1 day late, so 90% of the points count: 0.8 of 8 points were deducted." in page


def test_the_index_says_that_it_is_partial_until_all_is_graded(tmp_path):
    """After a stopped run, it once linked to a dashboard that did not exist, and looked complete."""
    submission = hand_in(tmp_path / "in", "anna", LAB)
    record = Record("anna", LAB, "", [Answer("0.1", "x", 1.0, 1.0)])
    outputs, pages = Outputs(tmp_path, Policy()), []
    for write in (functools.partial(outputs.save, record, submission), outputs.write_all):
        write()
        pages.append((tmp_path / "index.html").read_text())
        assert ("dashboard.html" in pages[-1]) == (tmp_path / "dashboard.html").exists()
    assert ["Grading has not finished yet" in page for page in pages] == [True, False]


def test_totals_weigh_the_labs(tmp_path):
    of_two_labs = [
        Record("anna", lab, "", [Answer("0.1", "x", points, 2.0)]) for lab, points in (("a", 1.0), ("b", 2.0))
    ]
    policy_of_three = Policy({"b": policy.Lab(weight=3.0)})
    gradebook.write(of_two_labs, tmp_path, policy_of_three)
    assert rows(tmp_path / "totals.csv") == [{"student": "anna", "a": "1.0", "b": "2.0", "percent": "87.5"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("course.toml", "[late", "course.toml is not valid TOML"),
        ("course.toml", "[lates]", "unknown name 'lates'; the known names are names, late, labs"),
        ("course.toml", "[labs.02_ddp]", "unknown name '02_ddp'; the known names are 00_ranks"),
        ("course.toml", "[late]\ndays = 'x'", "days in .late. in course.toml must be a whole number, got 'x'"),
        ("course.toml", f"[labs.{LAB}]\nweight = -1", "weight .* must be a number of at least 0"),
        ("course.toml", f"[labs.{LAB}]\ndeadline = 2026-11-30T23:59:00", "needs a time zone"),
        ("overrides.csv", "name,points\n", "first line of overrides.csv must be student,exercise,points,comment"),
        ("overrides.csv", "student,exercise,points,comment\nanna,0.1,x,\n", "line 2: 'x' is not a number"),
        ("overrides.csv", "student,exercise,points,comment\nanna,0.1,-1,\n", "the points must not be negative, got -1"),
    ],
)
def test_a_mistake_in_an_instructors_file_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(policy.Mistake, match=message):
        policy.load(tmp_path / "course.toml", tmp_path / "overrides.csv")


def test_anonymous_pages_have_codes_that_stay_and_a_key(tmp_path):
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for student in ("anna", "ben"):
        hand_in(handed_in, student, LAB)
    for _ in range(2):
        grade.grade_all(handed_in, folder, grade.Request(anonymous=True), grader=instant)
        keys = rows(folder / "anonymous-key.csv")
    codes = {row["student"]: row["code"] for row in keys}
    assert codes.keys() == {"anna", "ben"} and rows(folder / "anonymous-key.csv") == keys
    written = [path for path in (folder / "anonymous").rglob("*") if path.is_file()]
    assert len(written) == 2 + 5 and not any("anna" in str(path.relative_to(folder)) for path in written)
    assert not any("anna" in path.read_text() or "ben<" in path.read_text() for path in written)


def test_anonymous_pages_stay_up_to_date_and_say_what_is_not_removed(tmp_path):
    """A later run without --anonymous once left the pages of the earlier one as they were."""
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    hand_in(handed_in, "anna", LAB)
    grade.grade_all(handed_in, folder, grade.Request(anonymous=True), grader=instant)
    hand_in(handed_in, "ben", LAB)
    grade.grade_all(handed_in, folder, grader=instant)
    assert len(rows(folder / "anonymous" / "gradebook.csv")) == 2
    index, plain = (path.read_text() for path in (folder / "anonymous" / "index.html", folder / "index.html"))
    assert "error messages contain, are not removed." in index and "for you to check" not in index
    assert "are not removed" not in plain and "for you to check" in plain
    assert "names in code and error messages stay" in grade.ANONYMOUS


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
    write_page(record, tmp_path)
    write_index([record], tmp_path)
    page = (tmp_path / "feedback" / record.student / f"{LAB}.html").read_text()
    index = (tmp_path / "index.html").read_text()
    for text in (page, index):
        assert "<script" not in text and "<b>" not in text and "&lt;script&gt;" in text
    assert 'href="feedback/%3D1%2B1%20%3Cb%3E/00_ranks.html"' in index
    assert "uses" not in page, "notices are for the instructor only"


def test_the_page_shows_the_code_of_failed_exercises_with_the_numbers_of_its_lines(tmp_path):
    answers = [Answer("0.1", "piece", 0.0, 2.0, [Verdict("piece", "values", False, (2,))], cells=["piece"])]
    answers += [Answer("0.2", "late", 1.0, 2.0, [Verdict("late", "values", True)], replaced_by_ours=["0.1"])]
    answers += [Answer("0.3", "none", 0.0, 2.0, reason=records.UNANSWERED, cells=["none"])]
    record = Record("anna", LAB, "", answers, code={"piece": "\n\ndef f():\n    return '<b>'", "none": "stub"})
    write_page(record, tmp_path)
    page = (tmp_path / "feedback" / "anna" / f"{LAB}.html").read_text()
    assert '<span class="line">3</span>def f():\n' in page and "&lt;b&gt;" in page
    assert "judged together with the course's own code" in page and "Unanswered" in page and "stub" not in page
    assert record.why == (
        "0.1 piece: failed: values; 0.2 late: passed (judged with the course's own 0.1); 0.3 none: unanswered"
    )


def test_the_page_marks_the_check_without_which_an_exercise_earns_nothing(tmp_path):
    """The rule once named the check “values”, which some exercises do not have."""
    order = {"plain": '<td class="check">plain</td>', "values": "values <em>(essential)</em>"}
    verdicts = [Verdict("piece", check, True, (2,)) for check in order]
    first = [Verdict("other", check, False, (2,)) for check in ("every sample", "epochs")]
    answers = [Answer("0.1", "piece", 2.0, 2.0, verdicts), Answer("0.2", "other", 0.0, 1.0, first, bonus=True)]
    write_page(Record("anna", LAB, "", answers), tmp_path)
    page = (tmp_path / "feedback" / "anna" / f"{LAB}.html").read_text()
    for text in (
        *order.values(),
        "every sample <em>(essential)</em>",
        "they are not part of the maximum",
        "of 1 point ",
    ):
        assert text in page, text
    assert page.count("(essential)") == 2


def test_a_reason_is_short_and_names_every_decision_by_hand():
    many = [Verdict("piece", check, False, (2,)) for check in ("values", "wire", "group", "bf16")]
    by_hand = Answer("0.2", "other", 2.0, 2.0, many[:1], checked_points=0.0, comment="solved on paper")
    record = Record("anna", LAB, "", [Answer("0.1", "piece", 0.0, 2.0, many), by_hand])
    first, second = record.why.split("; ")
    assert first == "0.1 piece: failed: all 4 checks"
    assert second == "0.2 other: failed: values (2 points by hand: solved on paper)"


def test_a_check_that_did_not_run_has_a_sign_and_words_of_its_own(tmp_path):
    """Its sign once said that it had failed, and the text below that it had not run."""
    skipped = [Verdict("piece", name, False, (), "this check runs when “values” passes") for name in ("group", "wire")]
    verdicts = [Verdict("piece", "values", False, (2,), "wrong"), *skipped]
    record = Record("anna", LAB, "", [Answer("0.1", "piece", 0.0, 2.0, verdicts)])
    write_page(record, tmp_path)
    page = (tmp_path / "feedback" / "anna" / f"{LAB}.html").read_text()
    signs = re.findall(r'<td class="sign ([\w-]+)">([^<]+)<', page)
    assert signs == [("failed", "✗ failed"), *[("did-not-run", "– did not run")] * 2]
    assert record.why == "0.1 piece: failed: values; did not run: group, wire"


def test_a_decision_about_a_file_that_could_not_be_read_is_shown(tmp_path):
    """A student got a point by hand for a PDF, and nobody could see why."""
    record = Record("haddad", LAB, "", [Answer(f"0.{n}", "x", 0.0, 2.0, reason="it is not JSON") for n in (1, 2)])
    record.reason = "it is not JSON"
    decisions = Policy(overrides={("haddad", "0.1"): policy.Override(1.0, "right on paper")})
    decided = decisions.applied(record, None)
    write_page(decided, tmp_path)
    page = (tmp_path / "feedback" / "haddad" / f"{LAB}.html").read_text()
    for text in ("<p>Your instructor decided on 1 point.", "right on paper", "0.1 x: 1 of 2 points"):
        assert text in page, text
    assert page.count("It is not JSON.") == 1 and "it is not JSON" not in page and "0.2 x" not in page
    assert decided.why == "it is not JSON; 0.1 x: 1 point by hand: right on paper"
    assert decided.is_graded and not record.is_graded


def test_a_student_without_a_result_reads_what_to_do_next(tmp_path):
    advice = f"Hand in the file labs/{LAB}_lab.ipynb as JupyterLab saves it."
    answers = [Answer("0.1", "x", 0.0, 2.0, reason=records.UNANSWERED)]
    of_reasons = {
        "anna": Record("anna", LAB, "", [], "there is no notebook"),
        "ben": Record("ben", LAB, "", answers),
        "cleo": Record("cleo", LAB, "", [], "not graded, so run the grader again", final=False),
    }
    pages = {}
    for student, record in of_reasons.items():
        write_page(record, tmp_path)
        pages[student] = (tmp_path / "feedback" / student / f"{LAB}.html").read_text()
    assert f"There is no notebook. {advice}" in pages["anna"] and advice not in pages["cleo"]
    assert f"If you wrote code there, save labs/{LAB}_lab.ipynb in JupyterLab and hand in that file." in pages["ben"]
    gradebook.write_gradescope(of_reasons["anna"], tmp_path)
    results = json.loads((tmp_path / "gradescope" / "anna" / LAB / "results.json").read_text())
    assert results["output"] == f"there is no notebook\n{advice}"


def test_the_files_that_were_handed_in_instead_of_a_notebook_are_named(tmp_path):
    (tmp_path / "haddad" / LAB).mkdir(parents=True)
    digest = records.digest_of(finding.find(tmp_path, LAB)[0], "")
    for name in (f"{LAB}/report.pdf", f"{LAB}/timestamp.txt", "notes.docx", "01_collectives.ipynb", ".hidden"):
        (tmp_path / "haddad" / name).write_text("")
    (submission,) = finding.find(tmp_path, LAB)
    with pytest.raises(submissions.Unreadable, match=f"there is no notebook for {LAB}, only report.pdf, notes.docx$"):
        submissions.opened(submission)
    assert records.digest_of(submission, "") != digest, "the reason has changed"


def test_a_reason_that_several_exercises_have_is_given_once():
    """A rejected cell that several exercises share once filled three lines of the index with the same words."""
    answers = [Answer(f"0.{n}", name, 0.0, 2.0, reason="rejected: x.") for n, name in ((1, "a"), (2, "b"))]
    answers.append(Answer("0.3", "c", 0.0, 2.0, reason=records.UNANSWERED))
    assert Record("anna", LAB, "", answers).why == "0.1 a, 0.2 b: rejected: x; 0.3 c: unanswered"


@pytest.mark.parametrize(("path", "what"), [("candidate.py", "code"), (None, "cell")])
def test_an_endless_loop_gets_a_hint_and_is_no_cell_in_grading(monkeypatch, path, what):
    """The page once spoke of a cell, which grading does not have, and said nothing about the loop."""
    running = {"rank": 0, "busy": True, "waits": "no", "line": "line 3: while True: pass", "call": None, "counts": []}
    state = CellState([0], {}, {0: running})

    def run(*args, **options):
        raise CellFailed("Rank 0 is still running: line 3\n\nThe cell was stopped after 60 s.", {}, state, "", True)

    monkeypatch.setattr(attempts.ranks, "current", lambda: SimpleNamespace(run=run))
    with pytest.raises(failures.Wrong) as found:
        attempts.Attempt("piece", path, 1, random.Random(0)).run(print)
    assert f"The {what} was stopped after 60 s." in found.value.evidence
    assert found.value.hint == "Hint: is this line in a loop? If so, what would end the loop?"


def test_only_a_check_that_builds_models_speaks_of_their_hidden_units():
    """A check of ranks alone once said how many hidden units had been drawn."""
    drawn = DrawnSizes.drawn(random.Random(0), 2)
    with models_of(drawn):
        pass
    assert str(drawn) == ""
    steps = drawn.steps(3)
    assert str(drawn) == f"up to {steps} steps"
    with models_of(drawn):
        awkward.build("Tied", 0)
    assert str(drawn) == f"models of {drawn.width} hidden units, up to {steps} steps"


def test_a_probe_of_many_small_messages_may_cost_more_headers_with_each_step():
    """TopK(0.02) needs 50 steps to send everything. On four ranks, their headers once cost right code its points."""
    heard = []
    meter = SimpleNamespace(begin=lambda: None, contradicts=lambda reports, steps: heard.append(steps) or "")
    attempt = SimpleNamespace(sizes=DrawnSizes(added=range(15, 40), draws=random.Random(0)), world_size=4)
    attempt.sizes.fed_steps = 54
    GradingRunner(meter=meter).probe(attempt, lambda **options: ([], []))
    assert heard == [54, 54 * attempt.sizes.repeats]


def test_a_slow_probe_is_repeated_less_often_and_has_time_for_it(monkeypatch):
    """Code that waited 0.4 s in each call, as if the network were slow, once was stopped after the time of one call."""
    clock, called = [0.0], []

    def call(times=1, timeout_s=20.0):
        clock[0] += 0.8 * times  # a check with two calls
        called.append(times)
        assert 0.8 * times < timeout_s
        return [], []

    monkeypatch.setattr(drawing.time, "monotonic", lambda: clock[0])
    attempt = SimpleNamespace(sizes=DrawnSizes(added=range(15, 40), draws=random.Random(0)), world_size=4)
    GradingRunner().probe(attempt, call)
    assert called == [1, drawing.FEWEST_REPEATS]


def test_a_long_name_in_a_notice_can_break_and_keeps_the_table_on_the_page(tmp_path):
    write_index([Record("anna", LAB, "", [], notices=["uses torch.a.very.long.name"])], tmp_path)
    page = (tmp_path / "index.html").read_text()
    assert '<td class="long">uses torch.a.very.long.name</td>' in page and "td.long { overflow-wrap: anywhere;" in page


def test_every_rule_of_the_style_sheet_is_one_of_html(tmp_path):
    """Half a rule, left over from a merge, once spoilt the one after it."""
    write_index([], tmp_path)
    page = (tmp_path / "index.html").read_text()
    rules = page[page.index("<style>") + 7 : page.index("</style>")]
    selectors = re.findall(r"([^{};]+)\{", re.sub(r"/\*.*?\*/", "", rules))
    names = {re.split(r"[.: ]", part.strip())[0] for selector in selectors for part in selector.split(",")}
    assert names <= {"", "body", "h1", "h2", "table", "td", "th", "tr", "p", "img", "pre", "@media"}, names
    assert rules.count("{") == rules.count("}")


def test_tables_have_no_formulas_and_one_line_per_row(tmp_path):
    gradebook.write([hostile_record()], tmp_path, Policy())
    for name in ("gradebook.csv", "exercises.csv"):
        (row,) = rows(tmp_path / name)
        assert not any(value.startswith(("=", "+", "-", "@")) or "\n" in value for value in row.values())
        assert row["student"] == "'=1+1 <b>"


def test_a_table_read_with_semicolons_has_no_formulas_either(tmp_path):
    record = hostile_record()
    record.reason = 'raised ;"=1+1;x and ;=2+2'
    gradebook.write([record], tmp_path, Policy())
    with open(tmp_path / "gradebook.csv", newline="") as file:
        cells = [cell for row in csv.reader(file, delimiter=";") for cell in row]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)


def test_semicolons_stay_in_tables(tmp_path):
    """Commas in their place once made it impossible to tell reasons from lists of checks."""
    failed = [Verdict("piece", check, False, (2,)) for check in ("values", "wire")]
    answers = [Answer(f"0.{n}", "x", 0.0, 2.0, failed, checked_points=0.0, comment=f"{n}; see me") for n in (1, 2)]
    gradebook.write([Record("anna", LAB, "", answers)], tmp_path, Policy())
    (row,) = rows(tmp_path / "gradebook.csv")
    by_hand = [f"0.{n} x: failed: values, wire (0 points by hand: {n}; see me)" for n in (1, 2)]
    assert row["reason"] == "; ".join(by_hand)
    assert [row["comment"] for row in rows(tmp_path / "exercises.csv")] == ["1; see me", "2; see me"]
    for text in ("a; =1+1", 'a;" -1', "=1"):
        assert records.as_cell(records.as_cell(text)) == records.as_cell(text) != text


def test_a_name_in_an_old_encoding_stops_nobody(tmp_path):
    """A zip file from an old system gives a folder a name that is not valid UTF-8."""
    handed_in, folder = tmp_path / "in", tmp_path / "out"
    for name in (b"Jos\xe9", b"zoe"):
        (Path(os.fsdecode(bytes(handed_in) + b"/" + name)) / LAB).mkdir(parents=True)
    hand_in(handed_in, "anna", LAB)
    graded = grade.grade_all(handed_in, folder, grade.Request(0), grader=instant)
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
        grade.grade_all(tmp_path / "in", tmp_path / "out", grade.Request(number), grader=instant)


def test_nothing_runs_without_bubblewrap(tmp_path, monkeypatch):
    hand_in(tmp_path / "in", "anna", LAB)
    monkeypatch.setattr(sandbox, "require", REQUIRE)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(sandbox.NoSandbox, match="apt-get install bubblewrap"):
        grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)


def is_judging(process: psutil.Process) -> bool:
    """Return whether this is a process of a judge, all of which are forks of the first one."""
    with contextlib.suppress(psutil.Error):
        return process.name() != "bwrap" and "instructor.grade.judge" in process.cmdline()
    return False


def test_make_grade_continues_after_ctrl_c_in_a_terminal(tmp_path):
    """Run the command that an instructor types, with a right and a wrong submission.

    A terminal signals all processes of a command. The sandbox once ended, and the code seemed to have crashed it.
    """
    need_sandbox()
    hand_in(tmp_path / "in", "anna", LAB)
    wrong = "%%ranks\ndef sum_over_ranks(number):\n    return number"
    hand_in(tmp_path / "in", "ben", LAB, writes(sum_over_ranks=wrong))
    command = [sys.executable, "-m", "instructor.grade", str(tmp_path / "in"), "--chapter", "0"]
    command += ["--into", str(tmp_path / "out"), "--jobs", "2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        grader, deadline = psutil.Process(process.pid), time.monotonic() + deadlines.scaled(120)
        while sum(map(is_judging, grader.children(recursive=True))) < 3:  # the judge, its fork server and a rank
            assert time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        printed, _ = process.communicate(timeout=deadlines.scaled(300))
    assert process.returncode == 130 and re.search("Graded so far: [12]", printed), printed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    anna, ben = rows(tmp_path / "out" / "gradebook.csv")
    assert (anna["points"], anna["reason"]) == ("15.0", "all checks passed")
    assert "is the same as that of ben" in anna["look_at"]  # Both have our code of 0.2 to 0.5.
    assert (ben["points"], ben["reason"]) == ("13.0", "0.1 sum_over_ranks: failed: values; did not run: wire")
    page = (tmp_path / "out" / ben["feedback"]).read_text()
    assert "✗ failed" in page and "✓ passed" in page and 'class="hint"' in page
    assert [row["number"] for row in rows(tmp_path / "out" / "exercises.csv")] == [f"0.{n}" for n in range(1, 6)] * 2


class Judged:
    """Stands in for the sandbox. Each run of the judge takes the next of these verdicts' evidence."""

    def __init__(self, monkeypatch, slowdowns, evidence):
        self.time_scales, self.evidence = [], list(evidence)
        measured = iter(slowdowns)
        monkeypatch.setattr(machine_load, "slowdown", lambda: next(measured))
        monkeypatch.setattr(grading, "_read", lambda *_: cells_of(self.submission))
        monkeypatch.setattr(sandbox, "run", self.run)

    def run(self, module, job, course, limits, handed_in=None, time_scale=None):
        self.time_scales.append(time_scale)
        evidence = self.evidence.pop(0)
        verdict = {"exercise": "sum_over_ranks", "check": "values", "passed": not evidence, "evidence": evidence}
        verdict |= {"world_sizes": [2], "hint": ""}
        lines = [{"done": task["name"], "verdicts": [verdict], "reason": ""} for task in job["tasks"]]
        return sandbox.Ended([sandbox.READY, *lines])


def test_submissions_that_are_judged_at_once_do_not_make_each_other_wait_longer(monkeypatch):
    monkeypatch.delenv("COURSE_TIME_SCALE", raising=False)
    monkeypatch.setattr(machine_load.joblib, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine_load, "slowdown", lambda: 6.0)
    assert machine_load.time_scale(beside=0) == 12.0
    assert machine_load.time_scale(beside=1) == 1.0  # Two probes and four ranks on two cores are three times slower.
    monkeypatch.setattr(machine_load, "slowdown", lambda: 12.0)
    assert machine_load.time_scale(beside=1) == 8.0  # Something else keeps the machine busy, too.


@pytest.mark.parametrize(("cores", "memory_gb", "jobs"), [(2, 20, 4), (2, 3, 1), (2, 1, 1), (16, 100, 32), (16, 8, 4)])
def test_by_default_each_core_gets_two_submissions_if_there_is_memory(monkeypatch, cores, memory_gb, jobs):
    monkeypatch.setattr(machine_load.joblib, "cpu_count", lambda: cores)
    monkeypatch.setattr(machine_load.cgroup, "limit_bytes", lambda: None)
    monkeypatch.setattr(machine_load.psutil, "virtual_memory", lambda: SimpleNamespace(available=memory_gb * 10**9))
    assert machine_load.most_jobs() == jobs


OUT_OF_TIME = "Rank 0 is still running.\n\nThe cell was stopped after 20 s."


@pytest.mark.parametrize(
    "lines",
    [
        [],  # the ranks could not load an empty file, so the judge never was ready
        [sandbox.READY, {"failed": "[Errno 28] No space left on device: 'candidate.py'"}],
        [sandbox.READY, {"begin": "sum_over_ranks"}, {"failed": "[Errno 13] Permission denied: 'candidate.py'"}],
    ],
)
def test_a_failure_of_our_own_files_is_graded_again_and_costs_no_points(tmp_path, monkeypatch, lines):
    read = sandbox.Ended([sandbox.READY, {"cells": cells_of(hand_in(tmp_path / "in", "anna", LAB))}])
    judged = sandbox.Ended(lines, printed="RuntimeError: the ranks cannot load an empty file", status=1)
    endings = iter([read, judged])
    monkeypatch.setattr(sandbox, "run", lambda *_, **__: next(endings))
    (record,) = grade.grade_all(tmp_path / "in", tmp_path / "out", grade.Request(number=0))
    why = lines[-1]["failed"] if lines else "the ranks cannot load an empty file"
    assert not record.is_graded and not record.final and not record.answers and why in record.why
    assert records.load(tmp_path / "out", "anna", LAB) is None, "the next run judges it again"


def test_a_check_without_room_for_its_files_says_so(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(folders.NoFolder, match=r"no room for it: .*nowhere"), folders.shared_folder():
        pass
    monkeypatch.undo()
    with pytest.raises(folders.NoFolder, match="No space left"), folders.shared_folder():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(FileNotFoundError), folders.shared_folder():  # what the student's code should have written
        raise FileNotFoundError(errno.ENOENT, "step-3")


@pytest.mark.parametrize(
    ("slowdowns", "evidence", "time_scales", "passes"),
    [
        ([1.0], [""], [1.0], True),
        ([4.0], [""], [8.0], True),
        ([1.0, 4.0], [OUT_OF_TIME, ""], [1.0, 8.0], True),  # it has become busier
        ([4.0, 4.0], [OUT_OF_TIME], [8.0], False),
        ([1.0], ["element 0 is 1, expected 2"], [1.0], False),
        ([1000.0], [""], [machine_load.MOST_SCALE], True),
    ],
)
def test_a_busy_machine_costs_no_points(tmp_path, monkeypatch, slowdowns, evidence, time_scales, passes):
    monkeypatch.delenv("COURSE_TIME_SCALE", raising=False)
    judged = Judged(monkeypatch, slowdowns, evidence)
    judged.submission = hand_in(tmp_path, "anna", LAB)
    with course.unpacked(CHAPTERS[LAB]) as unpacked:
        one = replace(unpacked, tasks=unpacked.tasks[:1])
        record = grading.grade(judged.submission, one, Limits())
    assert judged.time_scales == time_scales
    assert (record.points == record.max_points) == passes
