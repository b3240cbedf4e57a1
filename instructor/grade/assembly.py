"""Write a student's cells into the one file that the ranks load.

In a notebook, a cell runs once, on all four ranks. In grading, the ranks load this file before each probe, even if the
probe runs on fewer ranks. Code that only tries an exercise, such as `assert sum_over_ranks(1.0) == 4.0`, could fail
there, so it is left out.
"""

import ast
from itertools import accumulate

from instructor.grade import screen

_FUNCTIONS_AND_CLASSES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_DEFINITIONS = (*_FUNCTIONS_AND_CLASSES, ast.Import, ast.ImportFrom)


def assembled(cells: list[dict], prelude: str) -> tuple[str, list[tuple[int, dict]]]:
    """Return the text of the file, and each cell with the line where it begins.

    Args:
        cells: The cells, as `submissions.pieces_of` returns them.
        prelude: Code for the top of the file.
    """
    features: dict[str, None] = {}
    sources = []
    for cell in cells:
        imports = [node for node in ast.parse(cell["source"]).body if _is_future(node)]
        features |= {alias.name: None for node in imports for alias in node.names}
        sources.append(_without(imports, cell)["source"])
    first = f"from __future__ import {', '.join(features)}" if features else ""  # It must be the first statement.
    top = f"{first}\n{prelude}\n\n"
    lines = [3 + source.count("\n") for source in sources]
    begins = accumulate(lines, initial=1 + top.count("\n"))
    return top + "\n\n\n".join(sources) + "\n", list(zip(begins, cells, strict=False))


def without_asserts(cells: list[dict]) -> list[dict]:
    """Return the cells without the assertions at the top level of the student's cells."""
    bodies = _bodies(cells)
    return [
        _without([node for node in body if isinstance(node, ast.Assert)], cell)
        for cell, body in zip(cells, bodies, strict=True)
    ]


def without_examples(cells: list[dict]) -> list[dict]:
    """Return the cells without the student's top-level code that only tries an exercise.

    Such code uses the student's functions, torch.distributed, or a result of these. It is left out, unless it changes
    a variable that a function, a class or one of the lab's own cells uses.
    """
    bodies = _bodies(cells)
    left = [node for body in bodies for node in body]
    wanted = {name for cell in cells if not cell["grade_id"] for name in screen.used_by(cell["source"])}
    variables = {name for node in left if not isinstance(node, _DEFINITIONS) for name in screen.names_of(node)[0]}
    kept: set[ast.stmt] = set()
    while found := [node for node in left if isinstance(node, _DEFINITIONS) or _changed_by(node, variables) & wanted]:
        kept |= {*found}
        left = [node for node in left if node not in kept]
        wanted = wanted.union(*(set.union(*screen.names_of(node)) for node in found))
    tried = {"dist"} | {node.name for node in kept if isinstance(node, _FUNCTIONS_AND_CLASSES)}
    for node in left:
        stored, used = screen.names_of(node)
        if isinstance(node, ast.Assert) or used & tried:
            tried |= stored
        else:
            kept.add(node)
    return [
        _without([node for node in body if node not in kept], cell) for cell, body in zip(cells, bodies, strict=True)
    ]


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _bodies(cells: list[dict]) -> list[list[ast.stmt]]:
    """Return the top-level statements of each of the student's cells, and [] for each of the lab's own cells."""
    return [ast.parse(cell["source"]).body if cell["grade_id"] else [] for cell in cells]


def _changed_by(node: ast.stmt, variables: set[str]) -> set[str]:
    """Return the names that a statement defines, and the variables that it changes, also by calling their methods."""
    changed = [each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store)]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return {_variable_of(node.value.func)} & variables
    return screen.names_of(node)[0] | {_variable_of(each) for each in changed}


def _variable_of(target: ast.AST) -> str:
    """Return the variable to which an attribute or an element belongs, or ""."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _without(nodes: list[ast.stmt], cell: dict) -> dict:
    """Return a cell in which `pass` replaces each of these statements. The other lines keep their numbers."""
    lines = [line.encode() for line in cell["source"].split("\n")]  # Columns are counted in bytes.
    for node in reversed(nodes):
        first, last = node.lineno - 1, node.end_lineno - 1
        rest = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [lines[first][: node.col_offset] + b"pass" + rest, *[b""] * (last - first)]
    return cell | {"source": b"\n".join(lines).decode()}
