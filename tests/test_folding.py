"""Stored outputs do not answer a prediction before the student has made it."""

import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import conftest
from instructor import build, contents, folding

PREDICTION = "my_prediction = 0.0"


def folded_sources(*cells) -> list[str]:
    notebook = folding.fold_answers(new_notebook(cells=list(cells)))
    nbformat.validate(notebook)
    return [cell.source for cell, hidden in zip(notebook.cells, folding.folded(notebook), strict=True) if hidden]


def test_outputs_are_folded_up_to_the_last_cell_that_uses_the_prediction():
    cells = [new_code_cell(source) for source in ("before", PREDICTION, "run()", "print(my_prediction)", "later()")]
    text = new_markdown_cell("Compare.")
    assert folded_sources(*cells[:3], text, *cells[3:]) == ["run()", "print(my_prediction)"]


def test_without_such_a_cell_they_are_folded_up_to_the_next_text():
    cells = [new_code_cell(PREDICTION), new_code_cell("run()"), new_markdown_cell("They hang."), new_code_cell("next")]
    assert folded_sources(*cells) == ["run()"]


def test_a_later_prediction_begins_anew():
    cells = [PREDICTION, "print(my_prediction)", "my_prediction_ms = 0.0", "run()", "print(my_prediction_ms)", "next"]
    expected = ["print(my_prediction)", "run()", "print(my_prediction_ms)"]
    assert folded_sources(*map(new_code_cell, cells)) == expected


def test_in_place_of_an_answer_jupyterlab_shows_a_sentence():
    """JupyterLab shows the first line of the first output, if that is text."""
    answer = nbformat.v4.new_output("stream", text="42")
    run, later = (new_code_cell(source, outputs=[answer]) for source in ("run()", "later()"))
    cells = [new_code_cell(PREDICTION), run, new_markdown_cell("Compare."), later]
    notebook = folding.cover_answers(folding.fold_answers(new_notebook(cells=cells)))
    assert folding.cover_answers(copy.deepcopy(notebook)) == notebook
    assert [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"] == [0, 2, 1]
    assert notebook.cells[1].outputs[0].data == {"text/plain": folding.COVER} == conftest.COVER


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda chapter: chapter.name)
def test_no_folded_output_of_a_lesson_begins_with_its_answer(chapter):
    built = nbformat.read(build.ROOT / contents.notebook("chapters", chapter.name), as_version=4)
    hidden = [cell for cell, folds in zip(built.cells, folding.folded(built), strict=True) if folds and cell.outputs]
    assert all(folding.is_cover(cell.outputs[0]) and len(cell.outputs) > 1 for cell in hidden)


def test_every_lesson_folds_something_after_each_prediction():
    for chapter in build.chapters():
        cells = folding.fold_answers(chapter.read("lesson")).cells
        begins = [index for index, cell in enumerate(cells) if folding._predicts(cell)]
        for begin in begins:
            following = next(cell for cell in cells[begin + 1 :] if cell.cell_type == "code")
            assert folding.folded(new_notebook(cells=[following])) == [True], (chapter.name, cells[begin].source)
