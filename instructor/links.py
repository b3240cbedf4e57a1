"""The links at the top and the bottom of every notebook: the lessons before and after it, its lab, its solution and
the glossary.
"""

import copy
from collections.abc import Callable

import nbformat

from instructor import contents

TAG = "links"
NAMES = {"chapters": "Lesson", "labs": "Lab", "solutions": "Solution"}
GLOSSARY = "chapters/glossary.md"


def titles() -> dict[str, str]:
    """Return the title of each chapter by the name of its folder, such as "04 · Overlap", in the course's order."""
    return {chapter.folder: f"{chapter.number:02d} · {chapter.title}" for chapter in contents.CHAPTERS.values()}


def line(folder: str, name: str, exists: Callable[[str], bool]) -> str:
    """Return the links of a notebook as a line of Markdown.

    Args:
        folder: The folder of the notebook: "chapters", "labs" or "solutions".
        name: The chapter's name, such as "04_overlap".
        exists: Tells whether there is a file of this path, such as "labs/04_overlap_lab.ipynb". Links lead only to
            files that exist: a student's bundle has no later chapters, and no solution of its own.
    """
    order = [chapter for chapter in titles() if exists(contents.notebook("chapters", chapter))]
    index = order.index(name)
    before, after = order[max(0, index - 1) : index], order[index + 1 : index + 2]
    found = [_link(f"← {titles()[chapter]}", contents.notebook("chapters", chapter), folder) for chapter in before]
    for kind, label in NAMES.items():
        path = contents.notebook(kind, name)
        if kind != folder and exists(path):
            found.append(_link(label, path, folder))
    if exists(GLOSSARY):
        found.append(_link("Glossary", GLOSSARY, folder))
    found += [_link(f"{titles()[chapter]} →", contents.notebook("chapters", chapter), folder) for chapter in after]
    return " | ".join(found)


def _link(text: str, path: str, folder: str) -> str:
    """Return a link from a notebook in a folder to a path in the course."""
    kind, file = path.split("/")
    return f"[{text}]({file})" if kind == folder else f"[{text}](../{path})"


def without_links(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the cells of a notebook that are not links."""
    return [cell for cell in notebook.cells if TAG not in cell.metadata.get("tags", [])]


def with_links(
    notebook: nbformat.NotebookNode, folder: str, name: str, exists: Callable[[str], bool]
) -> nbformat.NotebookNode:
    """Return a copy of a notebook that begins and ends with its links, which replace any links that it has."""
    linked = copy.deepcopy(notebook)
    first, last = (
        nbformat.v4.new_markdown_cell(line(folder, name, exists), id=f"links-{where}", metadata={"tags": [TAG]})
        for where in ("top", "bottom")
    )
    linked.cells = [first, *without_links(linked), last]
    return linked
