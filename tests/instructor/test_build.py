"""Built files match their source and were executed, and a lab differs from its solution only in its exercises."""

import copy
import re

import nbformat
import pytest
from nbformat.validator import validate

from instructor import answers, build, contents, new_chapter
from instructor.links import without_links

CHAPTERS = build.chapters()
IDS = [chapter.name for chapter in CHAPTERS]
OUR_FILES = ("rankset.py", "processes.py", "framework.py", "magic.py", "site-packages")


def _read(folder: str, chapter) -> nbformat.NotebookNode:
    return nbformat.read(build.ROOT / contents.notebook(folder, chapter.name), as_version=4)


def _code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_nothing_built_is_out_of_date():
    assert build.stale() == []


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "stale"),
    [
        ("lesson", {"chapters/02_manual_ddp.ipynb"}),
        ("lab", {"labs/02_manual_ddp_lab.ipynb", "solutions/02_manual_ddp_solution.ipynb"}),
    ],
)
def test_a_changed_source_makes_its_notebooks_stale(monkeypatch, script, stale):
    """A change to the first cell makes exactly the files stale that are built from it."""
    original = build.Chapter.read

    def changed(self, name):
        notebook = original(self, name)
        if (self.name, name) == ("02_manual_ddp", script):
            notebook.cells[0].source += " changed"
        return notebook

    monkeypatch.setattr(build.Chapter, "read", changed)
    assert set(build.stale()) == stale


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("folder", ["chapters", "solutions"])
def test_cells_have_no_numbers_of_our_run(folder, chapter):
    """A number beside a cell means that the student has run it."""
    code = _code(_read(folder, chapter))
    results = [output for cell in code for output in cell.outputs if output.output_type == "execute_result"]
    assert {each.execution_count for each in [*code, *results]} == {None}


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("folder", ["chapters", "solutions"])
def test_errors_appear_only_where_intended_and_show_none_of_our_code(folder, chapter):
    for cell in _code(_read(folder, chapter)):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert not errors or "raises-exception" in cell.metadata.get("tags", []), cell.source
        for error in errors:
            assert not any(name in line for line in error.traceback for name in OUR_FILES), error.traceback
        text = str(cell.outputs)
        assert "Warning" not in text, text[:500]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
def test_lab_and_solution_differ_only_in_exercise_cells(chapter):
    lab, solution = _read("labs", chapter), _read("solutions", chapter)
    assert [cell.id for cell in lab.cells] == [cell.id for cell in solution.cells]
    for blank, solved in zip(without_links(lab), without_links(solution), strict=True):
        if "exercise" in blank.metadata.get("tags", []):
            assert "NotImplementedError" in blank.source and blank.source != solved.source
        else:
            assert blank.source == solved.source


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
def test_the_lab_has_no_solution_and_no_output(chapter):
    lab = _read("labs", chapter)
    assert all(not cell.outputs and cell.execution_count is None for cell in _code(lab))
    assert not any("SOLUTION" in cell.source for cell in lab.cells)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("folder", ["chapters", "labs", "solutions"])
def test_notebooks_are_valid_and_contain_no_paths_of_this_machine(folder, chapter):
    path = build.ROOT / contents.notebook(folder, chapter.name)
    notebook = nbformat.read(path, as_version=4)
    validate(notebook)
    assert "widgets" not in notebook.metadata
    text = path.read_text()
    assert str(build.ROOT) not in text and "/tmp/" not in text
    assert path.stat().st_size < 3 * 2**20


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("folder", ["chapters", "labs", "solutions"])
def test_notebooks_have_the_form_in_which_jupyterlab_saves_them(folder, chapter):
    """tests/house/test_browser.py compares this form with what JupyterLab saves."""
    text = (build.ROOT / contents.notebook(folder, chapter.name)).read_text()
    assert text == build.as_saved(nbformat.reads(text, as_version=4))


def test_a_notebook_with_the_right_content_gets_its_form_without_being_executed(monkeypatch, tmp_path):
    cells = [nbformat.v4.new_code_cell("1 + 1", id="a")]
    content = build._to_execute(nbformat.v4.new_notebook(cells=cells, metadata={"course": {}}))
    built = nbformat.from_dict(copy.deepcopy(content))
    path = tmp_path / "00_ranks.ipynb"
    nbformat.write(built, path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "chapters", lambda: CHAPTERS[:1])
    monkeypatch.setattr(build, "products", lambda chapter: {path: ("executed", content)})
    monkeypatch.setattr(build, "execute", lambda *_: pytest.fail("it was executed"))
    assert build.stale() == ["00_ranks.ipynb"]
    build.build([], force=False)
    assert build.stale() == [] and path.read_text() == build.as_saved(built)


def test_a_notebook_whose_text_has_changed_keeps_its_outputs(monkeypatch, tmp_path):
    def notebook(text: str, code: str = "6 * 7") -> nbformat.NotebookNode:
        cells = [nbformat.v4.new_markdown_cell(text), nbformat.v4.new_code_cell(code)]
        return build._to_execute(nbformat.v4.new_notebook(cells=cells, metadata={"course": {}}))

    def executed(content, folder):
        content.cells[1].outputs = [nbformat.v4.new_output("stream", text="42")]
        return content

    path = tmp_path / "00_ranks.ipynb"
    monkeypatch.setattr(build, "execute", executed)
    nbformat.write(build._with_outputs(notebook("Before."), path, force=False), path)
    monkeypatch.setattr(build, "execute", lambda content, folder: "executed again")
    after = build._with_outputs(notebook("After."), path, force=False)
    assert after.cells[0].source == "After." and after.cells[1].outputs
    assert build._with_outputs(notebook("Before.", "6 * 9"), path, force=False) == "executed again"
    assert build._with_outputs(notebook("Before."), path, force=True) == "executed again"


def test_assertions_that_move_to_another_cell_keep_the_outputs(monkeypatch, tmp_path):
    path = tmp_path / "00_ranks.ipynb"
    printed = nbformat.v4.new_output("stream", text="42")
    cells = [nbformat.v4.new_code_cell("my_guess = None"), nbformat.v4.new_code_cell("print(42)\nassert 42")]
    before = build._to_execute(nbformat.v4.new_notebook(cells=cells, metadata={"course": {}}))
    after = answers.hide_answers(copy.deepcopy(before))
    before.cells[1].outputs = [printed]
    nbformat.write(before, path)
    monkeypatch.setattr(build, "execute", lambda *_: pytest.fail("it was executed"))
    kept = build._with_outputs(after, path, force=False)
    assert [cell.outputs for cell in kept.cells] == [[], [printed], []]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("script", ["lesson", "lab"])
def test_the_output_of_a_cell_that_starts_ranks_is_not_compared(script, chapter):
    """It names processes, and shows progress."""
    starts = r"^(ranks\.start|measure\.start_behind_link)\("
    starting = [cell for cell in _code(chapter.read(script)) if re.search(starts, cell.source, re.MULTILINE)]
    assert starting
    for cell in starting:
        assert "nbval-ignore-output" in cell.metadata.get("tags", []), cell.source


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
def test_exercises_and_checks_have_nbgraders_metadata(chapter):
    cells = [cell for cell in _read("labs", chapter).cells if "nbgrader" in cell.metadata]
    gradings = [cell.metadata["nbgrader"] for cell in cells]
    assert len({grading["grade_id"] for grading in gradings}) == len(gradings)
    exercises = [cell for cell in _read("labs", chapter).cells if "exercise" in cell.metadata.get("tags", [])]
    assert sum(grading["solution"] for grading in gradings) == len(exercises) > 0
    assert sum(grading.get("points", 0) for grading in gradings) > 0
    for cell, grading in zip(cells, gradings, strict=True):
        assert grading["grade"] == cell.source.startswith("check."), cell.source


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
def test_only_a_draft_has_notes_to_its_author(chapter):
    texts = [(chapter.folder / f"{script}.py").read_text() for script in ("lesson", "lab")]
    assert chapter.is_draft or not any(new_chapter.AUTHOR in text for text in texts)


def test_the_first_output_of_the_course_does_not_skip_its_first_lesson():
    shown = next(cell.outputs for cell in _code(_read("chapters", CHAPTERS[0])) if "progress.show()" in cell.source)
    assert "Next: read chapters/00_ranks.ipynb" in shown[0].data["text/plain"]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("folder", ["chapters", "labs", "solutions"])
def test_cells_are_short(folder, chapter):
    longest = max(len(cell.source.splitlines()) for cell in _code(_read(folder, chapter)))
    assert longest <= 40


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
def test_a_lesson_imports_no_solution_of_its_own_or_a_later_chapter(chapter):
    forbidden = [module for c in CHAPTERS if c.name >= chapter.name for module in build.module_names(c)]
    source = (chapter.folder / "lesson.py").read_text()
    assert not [module for module in forbidden if re.search(rf"\bsolutions\.{module}\b", source)]


def test_a_class_that_is_split_over_cells_is_joined_in_the_module():
    cells = [
        "import math",
        "class Circle(Shape):\n    def __init__(self):\n        self.radius = 1\n\n\nUNIT = Circle",
        "class Circle(Circle):\n    # -- sizes\n\n    def area(self):\n        return math.pi * self.radius**2",
        "class Circle(Circle):\n    @property\n    def name(self):\n        return 'circle'",
        "def double(circle):\n    return 2 * circle.radius",
    ]
    joined = """\
class Circle(Shape):
    def __init__(self):
        self.radius = 1

    # -- sizes

    def area(self):
        return math.pi * self.radius**2

    @property
    def name(self):
        return 'circle'


UNIT = Circle"""
    assert build._with_whole_classes(cells) == [cells[0], joined, cells[4]]


@pytest.mark.parametrize("chapter", CHAPTERS, ids=IDS)
@pytest.mark.parametrize("script", ["lesson", "lab"])
def test_no_text_stands_behind_the_mark_of_a_cell(script, chapter):
    """jupytext would make it the cell's title, which no reader sees."""
    titled = [cell.metadata["title"] for cell in chapter.read(script).cells if "title" in cell.metadata]
    assert titled == []
