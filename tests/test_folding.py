"""Stored outputs do not answer a prediction before the student has made it."""

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from instructor import build, folding

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


def test_every_lesson_folds_something_after_each_prediction():
    for chapter in build.chapters():
        cells = folding.fold_answers(chapter.read("lesson")).cells
        begins = [index for index, cell in enumerate(cells) if folding._predicts(cell)]
        for begin in begins:
            following = next(cell for cell in cells[begin + 1 :] if cell.cell_type == "code")
            assert folding.folded(new_notebook(cells=[following])) == [True], (chapter.name, cells[begin].source)
