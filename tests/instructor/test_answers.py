"""What a lesson hides until the student has predicted, in its cells and outputs, and what its slides show instead."""

import ast
import copy
import importlib.util
import re

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import conftest
from instructor import answers, build, colab, contents, folding, slides
from tests import browser

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


# -- stored outputs do not answer a prediction, either


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


# -- slides

needs_mathml = pytest.mark.skipif(
    importlib.util.find_spec("latex2mathml") is None, reason="only `make slides`, `make site` and all tests need it"
)
WITH_SLIDES = [chapter for chapter in build.chapters() if any(slides.marks(chapter))]


def test_the_fast_path_has_slides():
    assert {"00", "01", "02", "04", "07", "09"} <= {chapter.name[:2] for chapter in WITH_SLIDES}


@needs_mathml
@pytest.mark.parametrize("chapter", WITH_SLIDES, ids=str)
def test_slides_have_a_motive_figures_and_a_recap_and_need_no_click(chapter):
    cells = slides.slides(chapter).cells
    kinds = [cell.metadata["slideshow"]["slide_type"] for cell in cells]
    assert kinds.count("slide") == slides.marks(chapter).count("slide") + 1
    assert "## Recap" in [cell.source for cell in cells] and sum("outputs" in cell for cell in cells) >= 4
    texts = [cell.source for cell, kind in zip(cells, kinds, strict=True) if kind == "-" and "outputs" not in cell]
    assert not any(text.endswith(":") or "$" in text for text in texts)
    assert not [cell.source for cell in cells if answers.SUMMARY in cell.source], "a text needs a click"


@needs_mathml
def test_what_fits_on_a_slide():
    text = "One. See the next cell. " + "Many words here. " * 40 + "\n\n**Predict.** No."
    assert slides.shortened(text, 45).startswith("One. Many words") and len(slides.shortened(text, 45).split()) <= 45
    assert slides.shortened("A table:\n\n| a |\n|---|\n\n**Terms**\n\n- x", 100).endswith("|---|")
    assert slides.shortened("[Lab 04](../labs/04.ipynb) uses $x$.", 45).startswith("Lab 04 uses <math")


@needs_mathml
@pytest.mark.slow
def test_slides_need_no_network_and_fit_the_screen(tmp_path):
    if browser.find_browser() is None or not slides.fetch_reveal(tmp_path):
        pytest.skip("there is no Chromium here, or pip cannot download reveal.js")
    written = [slides.write(chapter, tmp_path) for chapter in WITH_SLIDES]
    with browser.browser(browser.find_browser(), tmp_path / "profile", "slides") as context:
        for path in written:
            assert not re.search(r'(src|import)[^>]{1,20}"https?:', path.read_text(encoding="utf-8"))
            page = context.new_page()
            page.set_viewport_size({"width": 1280, "height": 720})
            errors = browser.listen(page)
            page.goto(path.as_uri())
            page.wait_for_function("window.Reveal && Reveal.isReady()")
            for number in range(page.evaluate("Reveal.getTotalSlides()")):
                page.evaluate(f"Reveal.slide({number})")
                shown = page.locator("section.present").locator("h1, h2, p, table, img, pre, li").filter(visible=True)
                boxes = [box for box in (each.bounding_box() for each in shown.all()) if box]
                assert max(box["y"] + box["height"] for box in boxes) <= 720, (path.name, number)
                assert max(box["x"] + box["width"] for box in boxes) <= 1280, (path.name, number)
            assert not errors
            page.close()
