"""What is handed in is taken apart by the exercises' names; what cannot be read is told in one sentence."""

import ast
import os

import nbformat
import pytest

from instructor import build
from instructor.grade import submissions
from instructor.grade.submissions import Submission, Unreadable, find, pieces_of
from tests.handed_in import CHAPTERS, cell_of, hand_in

LAB = "02_manual_ddp"
CHAPTER = CHAPTERS[LAB]


def handed_in(folder, student: str, change=lambda notebook: None) -> Submission:
    return hand_in(folder, student, LAB, change)


def candidate_of(submission: Submission, chapter=CHAPTER) -> str:
    return "\n\n\n".join(piece["source"] for piece in pieces_of(submission, chapter))


def test_students_are_folders_and_nobody_is_lost(tmp_path):
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
    assert [(each.student, each.path and each.path.name) for each in found] == [
        ("anna", f"{LAB}.ipynb"),
        ("ben", None),
        ("cleo", f"{LAB}.ipynb"),
        ("dora", None),
        ("emma", f"{LAB} (1).ipynb"),
    ]
    assert [lab.name for lab in submissions.labs_in(tmp_path)] == [LAB, "03_gradient_bucketing"]


def test_our_own_solution_handed_in_is_our_own_module(tmp_path):
    candidate = candidate_of(handed_in(tmp_path, "anna"), CHAPTER)
    built = next(iter(build.modules_of(CHAPTER).values()))
    assert [ast.dump(node) for node in ast.parse(candidate).body] == [ast.dump(node) for node in ast.parse(built).body]


def test_only_exercises_count_and_their_order_does_not(tmp_path):
    def change(notebook):
        for cell in notebook.cells:
            if "check" in cell.metadata.get("tags", []):
                cell.source = "print('all passed')"
        notebook.cells.insert(0, nbformat.v4.new_code_cell("import os\nos.cheated = True"))
        notebook.cells.reverse()

    plain, changed = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    assert candidate_of(changed, CHAPTER) == candidate_of(plain, CHAPTER)


def test_given_cells_are_the_instructors(tmp_path):
    def change(notebook):
        given = [cell for cell in notebook.cells if "export" in cell.metadata.get("tags", [])]
        for cell in given:
            if "exercise" not in cell.metadata["tags"]:
                cell.source = "raise SystemExit"

    assert "raise SystemExit" not in candidate_of(handed_in(tmp_path, "anna", change), CHAPTER)


def test_a_missing_exercise_stays_unwritten_and_the_rest_counts(tmp_path):
    def change(notebook):
        notebook.cells.remove(cell_of(notebook, "mean-over-ranks"))

    candidate = candidate_of(handed_in(tmp_path, "anna", change), CHAPTER)
    assert "def mean_over_ranks_" not in candidate and "class ManualDDP" in candidate


def write(path, text: str) -> Submission:
    path = path.parent / "anna" / path.name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Submission("anna", LAB, path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty file"),
        ("   \n", "empty file"),
        ('{"cells": [{"cell_type": "co', "no valid notebook"),
        ("[1, 2]", "no valid notebook"),
        ("not json", "no valid notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "code"}]}', "no valid notebook"),
        (nbformat.writes(nbformat.v4.new_notebook()), "none of this lab's exercises"),
    ],
)
def test_what_is_no_notebook_of_this_lab_is_told_in_one_sentence(tmp_path, text, said):
    with pytest.raises(Unreadable, match=said) as caught:
        candidate_of(write(tmp_path / "lab.ipynb", text), CHAPTER)
    assert len(str(caught.value).splitlines()) == 1


def test_a_notebook_of_another_lab_and_one_that_is_missing_are_told(tmp_path):
    submission = write(tmp_path / "lab.ipynb", nbformat.writes(build.lab_of(CHAPTERS["03_gradient_bucketing"])))
    with pytest.raises(Unreadable, match="none of this lab's exercises"):
        candidate_of(submission, CHAPTER)
    with pytest.raises(Unreadable, match="there is no notebook for 02_manual_ddp"):
        candidate_of(Submission("ben", LAB, None), CHAPTER)


def test_an_exercise_that_an_editor_split_or_copied_is_one_and_told(tmp_path):
    def change(notebook):
        first = cell_of(notebook, "mean-over-ranks")
        again = first.copy()
        again.id, again.source = "again", "%%ranks\nhelper = mean_over_ranks_"
        notebook.cells.insert(notebook.cells.index(first) + 1, again)

    plain, split = handed_in(tmp_path / "1", "anna"), handed_in(tmp_path / "2", "anna", change)
    (changed,) = [each for each in pieces_of(split, CHAPTER) if each not in pieces_of(plain, CHAPTER)]
    assert changed["source"].endswith("\n\nhelper = mean_over_ranks_") and "%%" not in changed["source"]
    assert submissions.twice_in(split) == ["mean-over-ranks"] and submissions.twice_in(plain) == []


def test_a_notebook_swollen_by_output_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1000)
    with pytest.raises(Unreadable, match="clear its outputs"):
        candidate_of(handed_in(tmp_path, "anna"), CHAPTER)


def test_a_link_to_anothers_work_is_not_followed_and_a_pipe_not_read(tmp_path):
    anna = handed_in(tmp_path, "anna")
    for student in ("ben", "cleo", "dora"):
        (tmp_path / student / LAB).mkdir(parents=True)
    (tmp_path / "ben" / LAB / f"{LAB}.ipynb").symlink_to(anna.path)
    (tmp_path / "cleo" / LAB).rmdir()
    (tmp_path / "cleo" / LAB).symlink_to(anna.path.parent)
    os.mkfifo(tmp_path / "dora" / LAB / f"{LAB}.ipynb")
    for submission in find(tmp_path, LAB)[1:]:
        with pytest.raises(Unreadable, match="a link, or no file"):
            pieces_of(submission, CHAPTER)


def test_what_lies_beside_a_notebook_is_named(tmp_path):
    submission = handed_in(tmp_path, "anna")
    for name in ("shared.py", "timestamp.txt"):
        (submission.path.parent / name).write_text("")
    assert submissions.beside(submission) == ["shared.py"]
    assert submissions.beside(Submission("ben", LAB, None)) == []


HOSTILE = ["[" * 100_000, '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "\x00"]


@pytest.mark.parametrize("text", HOSTILE, ids=["nested", "a number for a cell", "nul"])
def test_a_file_that_breaks_its_reader_is_told_too(tmp_path, text):
    with pytest.raises(Unreadable, match="no valid notebook"):
        candidate_of(write(tmp_path / "lab.ipynb", text))
