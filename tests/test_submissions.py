"""What is handed in is taken apart by the exercises' names; what cannot be read is told in one sentence."""

import ast

import nbformat
import pytest

from shared import build, submissions
from shared.submissions import Submission, Unreadable, candidate_of, find

CHAPTER = next(chapter for chapter in build.chapters() if chapter.name == "02_manual_ddp")
LAB = CHAPTER.name


def handed_in(folder, student: str, change=lambda notebook: None) -> Submission:
    """Hand in our own solution, changed."""
    notebook = build.solution_of(CHAPTER)
    change(notebook)
    path = folder / student / LAB / f"{LAB}.ipynb"
    path.parent.mkdir(parents=True)
    nbformat.write(notebook, path)
    return Submission(student, LAB, path)


def cell_of(notebook, name: str):
    return next(cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == name)


def test_students_are_folders_and_nobody_is_lost(tmp_path):
    handed_in(tmp_path, "anna")
    (tmp_path / "ben").mkdir()
    flat = tmp_path / "cleo" / f"{LAB}.ipynb"
    flat.parent.mkdir()
    flat.write_text("{}")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "notes.txt").write_text("not a student")
    found = find(tmp_path, LAB)
    assert [(each.student, each.path and each.path.name) for each in found] == [
        ("anna", f"{LAB}.ipynb"),
        ("ben", None),
        ("cleo", f"{LAB}.ipynb"),
    ]


def test_our_own_solution_handed_in_is_our_own_module(tmp_path):
    candidate = candidate_of(handed_in(tmp_path, "anna"), CHAPTER)
    built = build.module_of(CHAPTER)
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
    other = next(chapter for chapter in build.chapters() if chapter.name == "03_gradient_bucketing")
    submission = write(tmp_path / "lab.ipynb", nbformat.writes(build.lab_of(other)))
    with pytest.raises(Unreadable, match="none of this lab's exercises"):
        candidate_of(submission, CHAPTER)
    with pytest.raises(Unreadable, match="there is no notebook for 02_manual_ddp"):
        candidate_of(Submission("ben", LAB, None), CHAPTER)


def test_an_exercise_that_stands_twice_is_told(tmp_path):
    def change(notebook):
        again = cell_of(notebook, "mean-over-ranks").copy()
        again.id, again.source = "again", "def mean_over_ranks_(): pass"
        notebook.cells.append(again)

    with pytest.raises(Unreadable, match="the exercise mean-over-ranks stands in two cells"):
        candidate_of(handed_in(tmp_path, "anna", change), CHAPTER)


def test_a_notebook_swollen_by_output_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_BYTES", 1000)
    with pytest.raises(Unreadable, match="clear its outputs"):
        candidate_of(handed_in(tmp_path, "anna"), CHAPTER)
