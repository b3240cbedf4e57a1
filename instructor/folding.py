"""Fold the stored outputs that answer a prediction, so that a student does not see them before predicting.

JupyterLab unfolds an output when its cell runs. In place of a folded output, it shows the first line of the first one,
so a sentence comes before the answer. Viewers that cannot fold outputs, such as GitHub's, show all of them.
"""

import ast
import re

import nbformat

COVER = "Predict first, then run this cell."

_PREDICTS = re.compile(r"^my_\w+(?:, my_\w+)* = ", re.MULTILINE)
_NAMES = re.compile(r"\bmy_\w+")


def fold_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fold the outputs of the cells after each prediction.

    The last cell to fold is the last one that uses the prediction. If none does, it is the one before the next Markdown
    cell, or else the first one that displays something.
    """
    for begin, end in predictions(notebook):
        names = set(_NAMES.findall(notebook.cells[begin].source.split(" = ")[0]))
        after = range(begin + 1, end)
        code = [index for index in after if notebook.cells[index].cell_type == "code"]
        uses = [index for index in code if names & set(_NAMES.findall(notebook.cells[index].source))]
        texts = [index for index in after if notebook.cells[index].cell_type == "markdown"]
        last = max(uses) if uses else min(texts, default=end) - 1
        if not any(map(displays, notebook.cells[begin + 1 : last + 1])):
            last = next((index for index in code if displays(notebook.cells[index])), last)
        for index in range(begin + 1, last + 1):
            fold(notebook.cells[index])
    return notebook


def predictions(notebook: nbformat.NotebookNode) -> list[tuple[int, int]]:
    """Return, for each prediction, the index of its cell, and that of the next prediction's cell or the end."""
    begins = [index for index, cell in enumerate(notebook.cells) if _predicts(cell)]
    return list(zip(begins, [*begins[1:], len(notebook.cells)], strict=True))


def displays(cell) -> bool:
    """Tell whether a code cell shows something: it prints, fails, or ends with an expression."""
    if cell.cell_type != "code" or not cell.source.strip():
        return False
    tree = ast.parse(python_of(cell))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    prints = any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)
    is_value = isinstance(tree.body[-1], ast.Expr) and not asserts(tree.body[-1]) and not cell.source.startswith("%%")
    return prints or is_value or "raises-exception" in cell.metadata.get("tags", [])


def asserts(node: ast.AST) -> bool:
    """Tell whether a statement asserts something about a result."""
    return isinstance(node, ast.Assert) or (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith(("measure.expect", ".assert_volume"))
    )


def python_of(cell) -> str:
    """Return a cell's source with a comment in place of its magic, so that lines keep their numbers."""
    return re.sub("^%%", "# ", cell.source)


def cover_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Put the sentence before all folded outputs. A notebook that has it stays as it is."""
    for cell, hidden in zip(notebook.cells, folded(notebook), strict=True):
        if hidden and cell.outputs and not is_cover(cell.outputs[0]):
            cell.outputs.insert(0, nbformat.v4.new_output("display_data", {"text/plain": COVER}))
    return notebook


def is_cover(output) -> bool:
    """Return whether an output is the sentence before a folded answer."""
    return output.get("data") == {"text/plain": COVER}


def folded(notebook: nbformat.NotebookNode) -> list[bool]:
    """Return, for each cell, whether its outputs are folded."""
    return [cell.metadata.get("jupyter", {}).get("outputs_hidden", False) for cell in notebook.cells]


def _predicts(cell) -> bool:
    return cell.cell_type == "code" and bool(_PREDICTS.search(cell.source))


def fold(cell) -> None:
    """Fold a code cell's outputs. JupyterLab adds the older key to files that have only the newer one."""
    if cell.cell_type == "code":
        cell.metadata["jupyter"] = nbformat.from_dict(cell.metadata.get("jupyter", {}) | {"outputs_hidden": True})
        cell.metadata["collapsed"] = True
