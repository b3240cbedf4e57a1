"""Put what answers a prediction out of sight until the student has predicted: `lesson_of` in instructor/build.py.

- Stored outputs are folded (folding.py).
- Assertions about a result move into a hidden cell, tagged `claims`, behind the cell that measures it. If a notebook
  cell asserts something inside a loop, its whole source is folded.
- The text below the result opens at a click, and the outputs that it introduces are folded, too.

Two tags of a text's cell change this: `introduction` if the text only introduces the next result, so that the one below
that result answers, and `open` if neither this text nor any below it answers the prediction.
"""

import ast
import itertools
import re

import nbformat

from instructor import folding

SUMMARY = "The answer, and why"
OPEN, INTRODUCTION = "open", "introduction"
COVER = "# This cell asserts what the text says about the result."  # JupyterLab shows the first line of a fold.
MOVED = "-claims"  # the end of the id of a cell with moved assertions
_MAGIC = "%%ranks"
_BEHIND_A_CLICK = re.compile(r'<details class="answer">.*?</summary>\n\n(.*?)\n\n</details>', re.DOTALL)


def hide_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fold outputs, move assertions, and put texts behind a click, wherever they answer a prediction."""
    folding.fold_answers(notebook)
    folds = folding.folded(notebook)
    moved: dict[str, list] = {}
    for begin, end in folding.predictions(notebook):
        last = max(index for index in range(begin, end) if folds[index] or index == begin)
        texts = [index for index in range(last + 1, end) if notebook.cells[index].cell_type == "markdown"]
        for index in range(begin, next((text for text in texts if _has_heading(notebook.cells[text])), end)):
            moved[notebook.cells[index].id] = _without_claims(notebook.cells[index])
        _hide_texts(notebook.cells, [*texts, end])
    notebook.cells = list(itertools.chain(*(moved.get(cell.id, [cell]) for cell in notebook.cells)))
    for cell in notebook.cells:
        if "claims" in cell.metadata.get("tags", []):
            _hide_source(cell)
        if cell.metadata.get("jupyter", {}).get("source_hidden") and not cell.source.startswith(_MAGIC):
            cell.source = _covered(cell)
    return notebook


def _covered(cell) -> str:
    """Return a folded source whose first line, which JupyterLab shows, tells nothing, and what to do."""
    if folding.folded(nbformat.v4.new_notebook(cells=[cell])) == [True] and folding.displays(cell):
        return f"# {folding.COVER}\n{cell.source}"
    asserts = folding.asserts(ast.parse(cell.source).body[0])
    return f"{COVER}\n{cell.source}" if asserts else cell.source


def _hide_texts(cells: list, texts: list[int]) -> None:
    """Hide the text that answers, and fold what it introduces.

    Args:
        texts: The indices of the texts below a result, and that of the next prediction or the end.
    """
    for text, next_text in itertools.pairwise(texts):
        cell, tags = cells[text], cells[text].metadata.get("tags", [])
        if not {OPEN, INTRODUCTION} & set(tags):
            cell.source = behind_a_click(cell.source)
        if INTRODUCTION in tags or cell.source.endswith("</details>"):
            for introduced in cells[text + 1 : next_text]:
                folding.fold(introduced)
        if INTRODUCTION not in tags:
            return


def behind_a_click(markdown: str) -> str:
    """Put the text of a cell behind a click, without a heading that it begins with, up to the next heading."""
    lines = markdown.splitlines()
    headings = [index for index, line in enumerate(lines) if _is_heading(line)]
    begin = 1 if headings[:1] == [0] else 0
    ends = [index for index, line in enumerate(lines) if _is_heading(line) or line.startswith("**Predict.**")]
    end = next((index for index in ends if index >= begin), len(lines))
    parts = ("\n".join(part).strip() for part in (lines[:begin], lines[begin:end], lines[end:]))
    heading, answer, rest = parts
    if not answer:
        return markdown
    hidden = f'<details class="answer"><summary>{SUMMARY}</summary>\n\n{answer}\n\n</details>'
    return "\n\n".join(filter(None, (heading, hidden, rest)))


def in_the_open(markdown: str) -> str:
    """Return the text of a cell without the click."""
    return _BEHIND_A_CLICK.sub(r"\1", markdown)


def _is_heading(line: str) -> bool:
    return re.match(r"#{1,4} ", line) is not None


def _has_heading(cell) -> bool:
    return any(map(_is_heading, cell.source.splitlines()))


def _without_claims(cell) -> list:
    """Return a cell, and the cell into which its assertions have moved, if it has any."""
    tags = cell.metadata.get("tags", [])
    if cell.cell_type != "code" or "claims" in tags or "raises-exception" in tags:
        return [cell]
    tree = ast.parse(folding.python_of(cell))
    lines, claims = cell.source.splitlines(), []
    for statement in reversed([statement for statement in tree.body if folding.asserts(statement)]):
        claims[:0] = lines[statement.lineno - 1 : statement.end_lineno]
        del lines[statement.lineno - 1 : statement.end_lineno]
    if not cell.source.startswith(_MAGIC) and any(
        folding.asserts(node) for node in ast.walk(ast.parse("\n".join(lines)))
    ):
        _hide_source(cell)
    if not claims:
        return [cell]
    if not "".join(lines).removeprefix(_MAGIC).strip():  # There is nothing else in the cell.
        cell.metadata["tags"] = [*tags, "claims"]
        return [cell]
    cell.source = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    magic = [cell.source.splitlines()[0]] if cell.source.startswith(_MAGIC) else []
    tagged = {"tags": ["claims", "nbval-ignore-output"]}
    return [cell, nbformat.v4.new_code_cell("\n".join(magic + claims), id=cell.id + MOVED, metadata=tagged)]


def _hide_source(cell) -> None:
    cell.metadata["jupyter"] = nbformat.from_dict(cell.metadata.get("jupyter", {}) | {"source_hidden": True})
