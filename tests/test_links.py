"""Every notebook begins and ends with links to its neighbors, and none of them is dead."""

import nbformat
import pytest

from instructor import build, contents
from instructor.links import GLOSSARY, TAG, line, with_links

CHAPTERS = build.chapters()


@pytest.mark.parametrize("folder", ["chapters", "labs", "solutions"])
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.name)
def test_every_notebook_begins_and_ends_with_its_links(folder, chapter):
    notebook = nbformat.read(build.ROOT / contents.notebook(folder, chapter.name), as_version=4)
    first, *inner, last = notebook.cells
    assert first.source == last.source and TAG in first.metadata["tags"] and TAG in last.metadata["tags"]
    assert not [cell for cell in inner if TAG in cell.metadata.get("tags", [])]


@pytest.mark.parametrize(
    ("folder", "missing", "expected"),
    [
        (
            "chapters",
            (),
            "[← 00 · Ranks](00_ranks.ipynb) | [Lab](../labs/01_collectives_lab.ipynb) | "
            "[Solution](../solutions/01_collectives_solution.ipynb) | [Glossary](glossary.md) | "
            "[02 · Data parallelism by hand →](02_manual_ddp.ipynb)",
        ),
        (
            "labs",
            ("chapters/02_manual_ddp.ipynb", "solutions/01_collectives_solution.ipynb"),
            "[← 00 · Ranks](../chapters/00_ranks.ipynb) | [Lesson](../chapters/01_collectives.ipynb) | "
            "[Glossary](../chapters/glossary.md)",
        ),
        (
            "labs",
            ("chapters/00_ranks.ipynb", "chapters/02_manual_ddp.ipynb", "chapters/glossary.md"),
            "[Lesson](../chapters/01_collectives.ipynb) | [Solution](../solutions/01_collectives_solution.ipynb)",
        ),
    ],
)
def test_links_lead_to_what_exists(folder, missing, expected):
    kinds = ("chapters", "labs", "solutions")
    three = {contents.notebook(kind, chapter.name) for kind in kinds for chapter in CHAPTERS[:3]}
    present = {*three, GLOSSARY} - set(missing)
    assert line(folder, "01_collectives", present.__contains__) == expected


def test_a_notebook_with_other_links_keeps_its_outputs(monkeypatch, tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell("6 * 7")]
    notebook = build._to_execute(nbformat.v4.new_notebook(cells=cells, metadata={"course": {}}))
    before = with_links(notebook, "chapters", "00_ranks", lambda path: path == "chapters/00_ranks.ipynb")
    after = with_links(notebook, "chapters", "00_ranks", lambda path: True)

    def executed(content, folder):
        content.cells[2].outputs = [nbformat.v4.new_output("stream", text="42")]
        return content

    path = tmp_path / "00_ranks.ipynb"
    monkeypatch.setattr(build, "execute", executed)
    nbformat.write(build._with_outputs(before, path, force=False), path)

    monkeypatch.setattr(build, "execute", lambda content, folder: pytest.fail("was executed again"))
    assert not build.is_current(path, "executed", after)
    relinked = build._with_outputs(after, path, force=False)
    assert relinked.cells[2].outputs and relinked.cells[0].source == after.cells[0].source
    path.write_text(build.as_saved(relinked))
    assert build.is_current(path, "executed", after)


def test_links_are_replaced_and_not_added_twice():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 00 · Ranks")])
    once = with_links(notebook, "chapters", "00_ranks", lambda path: True)
    twice = with_links(once, "chapters", "00_ranks", lambda path: path == "chapters/00_ranks.ipynb")
    assert len(notebook.cells) == 1 and len(once.cells) == len(twice.cells) == 3
    assert "Lab" in once.cells[0].source and twice.cells[0].source == ""
