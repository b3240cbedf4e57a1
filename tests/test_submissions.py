"""Exercises are extracted from notebooks by name, and an unreadable notebook is reported in one sentence."""

import ast
import json
import os

import nbformat
import pytest

from instructor import build
from instructor.grade import finding, reader, submissions
from instructor.grade.finding import find
from instructor.grade.reader import Unreadable
from instructor.grade.submissions import Submission
from tests.handed_in import CHAPTERS, cell_of, cells_of, hand_in, pieces_of

LAB = "02_manual_ddp"
CHAPTER = CHAPTERS[LAB]


def handed_in(folder, student: str, change=lambda notebook: None) -> Submission:
    return hand_in(folder, student, LAB, change)


def candidate_of(submission: Submission) -> str:
    return "\n\n\n".join(piece["source"] for piece in pieces_of(submission))


def test_every_folder_is_a_student_with_or_without_a_notebook(tmp_path):
    handed_in(tmp_path, "anna")
    (tmp_path / "ben").mkdir()
    flat = tmp_path / "cleo" / f"{LAB}.ipynb"
    flat.parent.mkdir()
    flat.write_text("{}")
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora" / "03_gradient_bucketing.ipynb").write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("not a student")
    downloaded = tmp_path / "emma" / f"{LAB} (1).ipynb"
    downloaded.parent.mkdir()
    downloaded.write_text("{}")
    found = find(tmp_path, LAB)
    assert [(submission.student, submission.path and submission.path.name) for submission in found] == [
        ("anna", f"{LAB}.ipynb"),
        ("ben", None),
        ("cleo", f"{LAB}.ipynb"),
        ("dora", None),
        ("emma", f"{LAB} (1).ipynb"),
    ]
    assert [lab.name for lab in finding.labs_in(tmp_path)] == [LAB, "03_gradient_bucketing"]


def test_our_own_solution_becomes_our_own_module(tmp_path):
    candidate = candidate_of(handed_in(tmp_path, "anna"))
    built = next(iter(build.modules_of(CHAPTER).values()))
    assert [ast.dump(node) for node in ast.parse(candidate).body] == [ast.dump(node) for node in ast.parse(built).body]


def test_only_exercises_count_and_in_any_order(tmp_path):
    def change(notebook):
        for cell in notebook.cells:
            if "check" in cell.metadata.get("tags", []):
                cell.source = "print('all passed')"
        notebook.cells.insert(0, nbformat.v4.new_code_cell("import os\nos.cheated = True"))
        notebook.cells.reverse()

    plain, changed = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    assert candidate_of(changed) == candidate_of(plain)


def test_given_cells_come_from_the_instructor(tmp_path):
    def change(notebook):
        given = [cell for cell in notebook.cells if "export" in cell.metadata.get("tags", [])]
        for cell in given:
            if "exercise" not in cell.metadata["tags"]:
                cell.source = "raise SystemExit"

    assert "raise SystemExit" not in candidate_of(handed_in(tmp_path, "anna", change))


def test_a_missing_exercise_is_left_out_and_the_others_count(tmp_path):
    def change(notebook):
        notebook.cells.remove(cell_of(notebook, "mean-over-ranks"))

    candidate = candidate_of(handed_in(tmp_path, "anna", change))
    assert "def mean_over_ranks_" not in candidate and "class ManualDDP" in candidate


def write(path, text: str) -> Submission:
    path = path.parent / "anna" / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Submission("anna", LAB, path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty file"),
        ("   \n", "empty file"),
        ('{"cells": [{"cell_type": "co', "not a valid notebook"),
        ("[1, 2]", "not a valid notebook"),
        ("not json", "not a valid notebook"),
        (
            '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}',
            "not a valid notebook",
        ),
        (nbformat.writes(nbformat.v4.new_notebook()), "none of this lab's exercises"),
    ],
)
def test_a_file_that_is_no_notebook_of_this_lab_is_reported_in_one_sentence(tmp_path, text, message):
    with pytest.raises(Unreadable, match=message) as caught:
        candidate_of(write(tmp_path / "lab.ipynb", text))
    assert len(str(caught.value).splitlines()) == 1


def test_a_notebook_of_another_lab_and_a_missing_one_are_reported(tmp_path):
    submission = write(tmp_path / "lab.ipynb", nbformat.writes(build.lab_of(CHAPTERS["03_gradient_bucketing"])))
    with pytest.raises(Unreadable, match="none of this lab's exercises"):
        candidate_of(submission)
    with pytest.raises(Unreadable, match="there is no notebook for 02_manual_ddp"):
        candidate_of(Submission("ben", LAB, None))


def test_a_split_or_copied_exercise_is_joined_and_reported(tmp_path):
    def change(notebook):
        first = cell_of(notebook, "mean-over-ranks")
        again = first.copy()
        again.id, again.source = "again", "%%ranks\nhelper = mean_over_ranks_"
        notebook.cells.insert(notebook.cells.index(first) + 1, again)

    plain, split = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    (changed,) = [piece for piece in pieces_of(split) if piece not in pieces_of(plain)]
    assert changed["source"].endswith("\n\nhelper = mean_over_ranks_") and "%%" not in changed["source"]
    assert submissions.repeated_exercises(cells_of(split)) == ["mean-over-ranks"]
    assert submissions.repeated_exercises(cells_of(plain)) == []


def test_a_notebook_with_too_much_output_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1000)
    with pytest.raises(Unreadable, match="clear its outputs"):
        candidate_of(handed_in(tmp_path, "anna"))


def test_links_to_other_students_work_and_pipes_are_not_read(tmp_path):
    anna = handed_in(tmp_path, "anna")
    for student in ("ben", "cleo", "dora"):
        (tmp_path / student / LAB).mkdir(parents=True)
    (tmp_path / "ben" / LAB / f"{LAB}.ipynb").symlink_to(anna.path)
    (tmp_path / "cleo" / LAB).rmdir()
    (tmp_path / "cleo" / LAB).symlink_to(anna.path.parent)
    os.mkfifo(tmp_path / "dora" / LAB / f"{LAB}.ipynb")
    for submission in find(tmp_path, LAB)[1:]:
        with pytest.raises(Unreadable, match="a link or not a regular file"):
            cells_of(submission)


def test_other_files_beside_a_notebook_are_named(tmp_path):
    submission = handed_in(tmp_path, "anna")
    for name in ("shared.py", "timestamp.txt"):
        (submission.path.parent / name).write_text("")
    assert submissions.other_files(submission) == ["shared.py"]
    assert submissions.other_files(Submission("ben", LAB, None)) == []


def test_a_notebook_of_format_3_is_read():
    cell = {"cell_type": "code", "input": ["%%ranks\n", "x = 1"], "metadata": {}, "language": "python"}
    text = json.dumps({"nbformat": 3, "worksheets": [{"cells": [cell]}]})
    assert reader.code_cells_in(text.encode()) == [{"name": None, "source": "\nx = 1", "on_ranks": True}]


@pytest.mark.parametrize(("count", "source"), [(2001, "x"), (1, "x" * 500_001)])
def test_more_code_than_anybody_writes_is_reported(count, source):
    cell = {"cell_type": "code", "source": source}
    with pytest.raises(Unreadable, match="more than"):
        reader.code_cells_in(json.dumps({"cells": [cell] * count}).encode())


HOSTILE = ["[" * 100_000, '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "\x00"]


@pytest.mark.parametrize("text", HOSTILE, ids=["nested", "a number as a cell", "nul"])
def test_a_file_that_breaks_its_reader_is_reported_too(tmp_path, text):
    with pytest.raises(Unreadable, match="not a valid notebook"):
        candidate_of(write(tmp_path / "lab.ipynb", text))
