"""What answers a prediction is out of sight until the student has predicted."""

import ast

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from instructor import answers, build, colab, folding

PREDICTION = "my_prediction = None"


def hidden(*cells) -> list[nbformat.NotebookNode]:
    for index, cell in enumerate(cells):
        cell.id = f"lesson-{index:03d}"
    notebook = answers.hide_answers(new_notebook(cells=list(cells)))
    nbformat.validate(notebook)
    return notebook.cells


def hides_source(cell) -> bool:
    return cell.metadata.get("jupyter", {}).get("source_hidden", False)


def test_assertions_about_a_result_move_into_a_hidden_cell():
    source = "%%ranks 0\nx = f()\nassert x == 42\nprint(x)\n\nmeasure.expect(\n    x < 50,\n    'small',\n)"
    _, run, claims = hidden(new_code_cell(PREDICTION), new_code_cell(source))
    assert run.source == "%%ranks 0\nx = f()\nprint(x)" and not hides_source(run)
    assert claims.source == "%%ranks 0\nassert x == 42\nmeasure.expect(\n    x < 50,\n    'small',\n)"
    assert claims.id == "lesson-001-claims" and "claims" in claims.metadata.tags and hides_source(claims)


def test_the_first_line_of_a_hidden_cell_which_jupyterlab_shows_asserts_nothing():
    *_, claims = hidden(new_code_cell(PREDICTION), new_code_cell("print(x)\nassert x == 42"))
    assert claims.source == f"{answers.COVER}\nassert x == 42"


@pytest.mark.parametrize("source", ["assert x == 42", "%%ranks\nassert x == 42"])
def test_a_cell_with_nothing_but_assertions_is_hidden(source):
    _, claims = hidden(new_code_cell(PREDICTION), new_code_cell(source))
    assert claims.source.endswith(source) and "claims" in claims.metadata.tags and hides_source(claims)


def test_a_cell_that_asserts_in_a_loop_hides_its_source():
    _, run = hidden(new_code_cell(PREDICTION), new_code_cell("for x in found:\n    assert x == 42\nprint(found)"))
    assert hides_source(run) and run.source.startswith(f"# {folding.COVER}\nfor x in found:\n    assert")


@pytest.mark.parametrize("metadata", [{"tags": ["raises-exception"]}, {"tags": ["claims"]}])
def test_a_cell_that_fails_or_is_hidden_already_keeps_its_assertions(metadata):
    _, run = hidden(new_code_cell(PREDICTION), new_code_cell("x = 1\nassert x == 42", metadata=metadata))
    assert run.source == "x = 1\nassert x == 42"


def test_cells_of_other_sections_keep_their_assertions():
    cells = [new_code_cell("assert before"), new_code_cell(PREDICTION), new_code_cell("print(1)")]
    found = hidden(*cells, new_markdown_cell("It is 1.\n\n## Next"), new_code_cell("assert later"))
    assert [cell.source for cell in found if "assert" in cell.source] == ["assert before", "assert later"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It is 42.\n\nSo it is.", "<answer>\n\nIt is 42.\n\nSo it is.\n\n</details>"),
        ("## Waste\n\nIt is B.", "## Waste\n\n<answer>\n\nIt is B.\n\n</details>"),
        ("It is 42.\n\n### Next\n\nText.", "<answer>\n\nIt is 42.\n\n</details>\n\n### Next\n\nText."),
        ("It is 42.\n\n**Predict.** And now?", "<answer>\n\nIt is 42.\n\n</details>\n\n**Predict.** And now?"),
        ("## Next\n\n### Below", "## Next\n\n### Below"),
    ],
)
def test_a_text_is_behind_a_click_up_to_the_next_heading(text, expected):
    begin = f'<details class="answer"><summary>{answers.SUMMARY}</summary>'
    assert answers.behind_a_click(text) == expected.replace("<answer>", begin)
    assert answers.in_the_open(answers.behind_a_click(text)) == text


def test_a_figure_that_the_answer_introduces_is_folded():
    cells = [new_code_cell(PREDICTION), new_code_cell("run()"), new_markdown_cell("It is 42. In the figure:")]
    found = hidden(*cells, new_code_cell("draw()"), new_markdown_cell("Then:"), new_code_cell("more()"))
    assert folding.folded(new_notebook(cells=found)) == [False, True, False, True, False, False]


def test_a_text_that_only_introduces_the_result_stays_open():
    introduction = new_markdown_cell("In the figure, look left.", metadata={"tags": [answers.INTRODUCTION]})
    cells = [new_code_cell(PREDICTION), new_code_cell("run()"), introduction, new_code_cell("draw()")]
    found = hidden(*cells, new_markdown_cell("It is 42."))
    assert found[2].source == "In the figure, look left." and "<details" in found[4].source
    assert folding.folded(new_notebook(cells=found)) == [False, True, False, True, False]


def test_a_text_that_answers_nothing_stays_open():
    text = new_markdown_cell("Now the next question.", metadata={"tags": [answers.OPEN]})
    cells = hidden(new_code_cell(PREDICTION), new_code_cell("run()"), text, new_code_cell("draw()"))
    assert cells[2].source == "Now the next question."
    assert folding.folded(new_notebook(cells=cells)) == [False, True, False, False]


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda chapter: chapter.name)
def test_no_lesson_tells_an_answer_before_it_is_predicted(chapter):
    """Up to the next heading, no source asserts anything, and the text below the result is hidden."""
    notebook = build.lesson_of(chapter)
    folds = folding.folded(notebook)
    for begin, end in folding.predictions(notebook):
        last = max(index for index in range(begin, end) if folds[index] or index == begin)
        texts = [cell for cell in notebook.cells[begin:end] if cell.cell_type == "markdown"]
        texts_below = [cell for cell in notebook.cells[last + 1 : end] if cell.cell_type == "markdown"]
        is_open = any(answers.OPEN in cell.metadata.get("tags", []) for cell in texts)
        assert is_open or any("<details" in cell.source for cell in texts) or not texts_below
        for cell in notebook.cells[begin:end]:
            if cell.cell_type == "markdown" and any(line.startswith("#") for line in cell.source.splitlines()):
                break
            if cell.cell_type == "code" and not hides_source(cell) and not cell.source.startswith("%%ranks"):
                found = [node for node in ast.walk(ast.parse(folding.python_of(cell))) if folding.asserts(node)]
                assert not found, cell.source


def test_colab_shows_no_code_of_a_hidden_cell():
    cells = hidden(new_code_cell(PREDICTION), new_code_cell("print(x)\nassert x == 42"))
    copied = colab.for_colab(new_notebook(cells=cells), "chapters", "https://example.org/course").cells
    assert [cell.metadata.get("cellView") for cell in copied] == [None, None, None, None, "form"]
