"""A failed check offers the exercise's hints and its original cell, without widgets."""

import json

import nbformat
import pytest

from instructor import build
from shared.checks.engine import cells, display
from shared.checks.engine.verdicts import Verdict

NAME = "first_collectives.pass_right"


@pytest.fixture
def lab(tmp_path) -> str:
    """Return the path of lab 00, in which a student has changed the exercise's cell."""
    notebook = build.lab_of(build.chapters()[0])
    for cell in notebook.cells:
        cell.source = cell.source.replace(build.STUB, "return tensor")
    path = tmp_path / "lab.ipynb"
    nbformat.write(notebook, path)
    return str(path)


def test_hints_and_original_cell_are_read_from_the_students_own_file(lab, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", lab)
    found = cells.help_for(NAME)
    assert len(found.hints) == 2 and all(hint.startswith("<details><summary>") for hint in found.hints)
    (original,) = found.originals
    assert original.startswith("%%ranks\ndef pass_right(") and build.STUB in original


@pytest.mark.parametrize("content", ["", "[]", json.dumps({"cells": [], "metadata": {}})])
def test_without_a_lab_nothing_is_offered(tmp_path, monkeypatch, content):
    path = tmp_path / "other.ipynb"
    path.write_text(content)
    for known in (str(path), str(path) + "-missing", ""):
        monkeypatch.setenv("JPY_SESSION_NAME", known)
        assert cells.help_for(NAME) == cells.Assistance()


def test_blocks_are_shown_below_the_verdicts_and_code_is_escaped():
    verdicts = [Verdict("pass_right", "values", False, (2,), "it is wrong")]
    offered = cells.Assistance(("<details><summary>Hint</summary>Think.</details>",), ("if a < b: ...",))
    html = display.as_html(verdicts, "✗", assistance=offered)
    assert html.index("</table>") < html.index("<summary>Hint</summary>") < html.index("Start over")
    assert "if a &lt; b: ..." in html
    assert "<details>" not in display.as_html(verdicts, "✗")


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda chapter: chapter.name)
def test_every_lab_stores_the_original_of_each_exercise(chapter):
    lab = build.lab_of(chapter)
    exercises = [cell for cell in lab.cells if "exercise" in cell.metadata.get("tags", [])]
    assert lab.metadata["course"]["originals"] == {cell.id: cell.source for cell in exercises}
    assert exercises and all(build.STUB in cell.source for cell in exercises)
