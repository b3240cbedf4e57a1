"""The instructor's week: from a platform's download to grades, pages and feedback that the platform accepts."""

import argparse
import io
import os
import subprocess
import sys
import zipfile
from dataclasses import replace

import nbformat
import pytest

from instructor import build
from instructor.build import ROOT
from instructor.grade import command as grade
from instructor.grade import lms_zips, returns, sandbox, unchanged
from instructor.release import as_zip
from tests.handed_in import CHAPTERS, packed
from tests.test_grade import instant, rows

pytestmark = pytest.mark.exhaustive

LAB = "00_ranks"
NOTEBOOK = nbformat.writes(build.solution_of(CHAPTERS[LAB]))
LESSON = (ROOT / "chapters" / f"{LAB}.ipynb").read_text(encoding="utf-8")
CLASS = {
    f"obrienniamh_41005_900005_{LAB}_lab.ipynb": NOTEBOOK,
    f"lovelaceada_LATE_41001_900001_{LAB}_lab.ipynb": NOTEBOOK,
    f"curiemarie_41002_900002_{LAB}.ipynb": LESSON,
    f"curiemarie_41002_900003_{LAB}_lab-1.ipynb": NOTEBOOK,
    "noetheremmy_41003_900004_report.pdf": "%PDF",
}
MOODLE = {f"Ada Lovelace_41001_assignsubmission_file/{LAB}_lab.ipynb": NOTEBOOK}
NAMES = 'Student,ID\n"O\'Brien, Niamh",41005\n"Lovelace, Ada",41001\n'


def with_code(submission, course, limits):
    """Grade without a sandbox, and keep the code of all exercises."""
    record = instant(submission, course, limits)
    code = "\n".join(f"value_{n} = compute({n}) + other({n}) ** {n}" for n in range(40))
    cells = [name for task in course.tasks for name in task.cells]
    answers = [replace(answer, cells=cells[:1]) for answer in record.answers]
    missing = "there is no notebook" if submission.path is None else ""
    return replace(record, answers=answers, code=dict.fromkeys(cells, code), reason=missing)


@pytest.fixture
def graded(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    lms_zips.unpack(packed(tmp_path, CLASS), tmp_path / "in")
    (tmp_path / "in" / "gradebook.csv").write_text(NAMES, encoding="utf-8")
    (tmp_path / "in" / "course.toml").write_text('names = "gradebook.csv"\n', encoding="utf-8")
    grade.grade_all(tmp_path / "in", tmp_path / "out", grader=with_code)
    return {row["student"]: row for row in rows(tmp_path / "out" / "gradebook.csv")}


def test_what_the_platform_says_stays_visible(graded, tmp_path):
    index = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Canvas marks this as late" in graded["lovelaceada_41001"]["look_at"] and "marks this as late" in index
    assert "late" not in graded["obrienniamh_41005"]["look_at"]
    page = (tmp_path / "out" / graded["obrienniamh_41005"]["feedback"]).read_text(encoding="utf-8")
    assert graded["obrienniamh_41005"]["name"] == "O'Brien, Niamh"
    assert all("O&#39;Brien, Niamh" in text and "obrienniamh" not in text.split("<body>")[1] for text in (page,))
    assert "O&#39;Brien, Niamh</a>" in index and "curiemarie_41002</a>" in index  # who is not in the table


def test_the_choice_among_several_notebooks_is_on_the_page_and_in_the_index(graded, tmp_path):
    row = graded["curiemarie_41002"]
    sentence = f"{LAB}_lab-1.ipynb is graded, and this is not: {LAB}.ipynb (the lesson)."
    assert sentence in row["look_at"]
    assert sentence in (tmp_path / "out" / row["feedback"]).read_text(encoding="utf-8")


def test_copies_are_marked_in_the_index(graded, tmp_path):
    notice = "is the same as that of"
    assert notice in graded["lovelaceada_41001"]["look_at"] and notice in graded["obrienniamh_41005"]["look_at"]
    assert "curiemarie_41002; O'Brien, Niamh" in graded["lovelaceada_41001"]["look_at"]
    assert notice not in graded["noetheremmy_41003"]["look_at"]
    assert "whose code is alike" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (
            CLASS,
            [
                f"curiemarie_41002_900003_{LAB}.html",
                f"lovelaceada_LATE_41001_900001_{LAB}.html",
                f"obrienniamh_41005_900005_{LAB}.html",
            ],
        ),
        (MOODLE, [f"Ada Lovelace_41001_assignsubmission_file_{LAB}.html"]),
        ({f"team_7_41001_900001_{LAB}_lab.ipynb": NOTEBOOK}, [f"team_7_41001_900001_{LAB}.html"]),
        ({f"submission_77/{LAB}_lab.ipynb": NOTEBOOK}, []),
    ],
)
def test_feedback_is_packed_as_the_platform_expects_it(tmp_path, monkeypatch, files, names):
    monkeypatch.setattr(sandbox, "require", lambda: None)
    lms_zips.unpack(packed(tmp_path, files), tmp_path / "in")
    grade.grade_all(tmp_path / "in", tmp_path / "out", grader=instant)
    pages, remarks = returns.packed(LAB, tmp_path / "in", tmp_path / "out")
    with zipfile.ZipFile(io.BytesIO(as_zip(pages))) as archive:
        assert archive.namelist() == names
    assert len(remarks) == (1 if files is CLASS or not names else 0)


def test_a_run_with_nothing_to_do_ends_before_torch_is_imported(graded, tmp_path, monkeypatch):
    options = argparse.Namespace(
        **vars(unchanged.parser().parse_args([str(tmp_path / "in"), "--into", str(tmp_path / "out")]))
    )
    assert not unchanged.is_unchanged(options)
    unchanged.remember(options)
    assert unchanged.is_unchanged(options)
    for change in ({"chapter": 1}, {"student": ["x"]}, {"exercise": "0.1"}, {"anonymous": True}):
        assert not unchanged.is_unchanged(argparse.Namespace(**vars(options) | change))
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "instructor.grade",
        str(options.submissions),
        "--into",
        str(options.into),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.startswith("Nothing has changed since everything was graded") and "torch" not in done.stderr
    stamp = next((tmp_path / "in").rglob("*.ipynb"))
    for path in (stamp.with_name("timestamp.txt"), tmp_path / "out" / "overrides.csv"):
        path.write_text("x")
        assert not unchanged.is_unchanged(options)
        path.unlink()
        assert unchanged.is_unchanged(options)
    os.utime(stamp)
    assert not unchanged.is_unchanged(options)
    unchanged.remember(options)
    (tmp_path / "out" / "index.html").unlink()
    assert not unchanged.is_unchanged(options)


def test_the_time_that_is_left_is_estimated():
    assert [grade._left(90, 3, total) for total in (3, 4, 13)] == ["", ", about 30 s left", ", about 5 min left"]
    assert grade._left(60, 2, 100) == "", "the first ones are the quick ones"


@pytest.mark.parametrize("what", ["zip", "canvas", "moodle", "gradescope"])
def test_whoever_grades_a_download_is_told_to_sort_it(tmp_path, what):
    path = packed(tmp_path, CLASS)
    if what != "zip":
        names = {"canvas": next(iter(CLASS)), "moodle": next(iter(MOODLE)), "gradescope": f"submission_7/{LAB}.ipynb"}
        path = tmp_path / what
        (path / names[what]).parent.mkdir(parents=True)
        (path / names[what]).write_text(NOTEBOOK, encoding="utf-8")
    with pytest.raises(grade.Usage, match=r"is a platform's download; sort it into folders first: python -m"):
        grade.grade_all(path, tmp_path / "out")
