"""Write a student's cells into the one file that the ranks load, with what they use from the notebook's other cells.

In a notebook, a cell runs once, on all four ranks. In grading, the ranks load this file before each probe, even if the
probe runs on fewer ranks. Code that only tries an exercise, such as `assert sum_over_ranks(1.0) == 4.0`, could fail
there, so it is left out.
"""

import ast
from collections.abc import Collection
from dataclasses import replace
from itertools import accumulate

from instructor.grade import static_checks
from shared import mine
from shared.mine import FUNCTIONS_AND_CLASSES, Definition
from shared.ranks.definitions import bound_by

_DEFINITIONS = (*FUNCTIONS_AND_CLASSES, ast.Import, ast.ImportFrom)


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


def from_other_cells(
    cells: list[dict], others: list[dict], wanted: Collection[str], given: Collection[str]
) -> list[dict]:
    """Return what the exercises use from the notebook's other cells, each statement as a cell of its own.

    Names that the lab's own cells define keep their meaning.

    Args:
        cells: The cells, as `submissions.pieces_of` returns them.
        others: The other cells, as `submissions.other_cells` returns them, each with its place.
        wanted: The names of the exercises, whose answers may be in other cells.
        given: The names that all ranks have.
    """
    own = {
        *given,
        *(name for cell in cells if not cell["grade_id"] for each in _parsed(cell) for name in each.new_names),
    }
    variables, lent = _variables_in(others), {}
    for number, other in enumerate(others):
        for index, each in enumerate(_parsed(other, variables)):
            facts = {"grade_id": f"added {number}.{index}", "source": each.source, "line": each.line}
            each = replace(each, names=_names_beside(each, own))
            lent[each] = other | facts | {"lends": each}
    answers = [each for cell in cells if cell["grade_id"] for each in _parsed(cell)]
    needed = mine.needed_for({*wanted}.union(*(each.names | each.used for each in answers)), [*lent])
    return [lent[each] for each in needed]


def inserted(cells: list[dict], added: list[dict], blank: Collection[str]) -> list[dict]:
    """Return the cells with the added ones, each before the exercise that follows it in the notebook.

    An exercise that is still blank is left out if the added cells answer it.
    """
    names = {name for each in added for name in each["lends"].names}
    answered = [cell for cell in cells if cell["grade_id"] in blank and static_checks.lends(cell["source"]) <= names]
    order = {cell["cell"]: index for index, cell in enumerate(cells) if cell["cell"]}
    keyed = [(order.get(each["before"], len(cells)), 0, each) for each in added]
    keyed += [(index, 1, cell) for index, cell in enumerate(cells) if cell not in answered]
    return [cell for _, _, cell in sorted(keyed, key=lambda each: each[:2])]


def used_from(added: list[dict], cells: list[dict], names: Collection[str]) -> list[dict]:
    """Return those of the added cells that these names or cells use."""
    used = [each.used for cell in cells for each in _parsed(cell)]
    needed = mine.needed_for({*names}.union(*used), [each["lends"] for each in added])
    return [each for each in added if each["lends"] in needed]


def code_of(cells: list[dict]) -> dict[str, str]:
    """Return the code of cells by their grade_ids. Its lines have the numbers that they have in the notebook."""
    return {cell["grade_id"]: "\n" * (cell["line"] - 1) + cell["source"] for cell in cells}


def without_later_cells(cells: list[dict], names: Collection[str], piece: str) -> list[dict]:
    """Return the cells up to the last one of an exercise, or [] if no later cell redefines a helper of these cells.

    Students usually run each check right after its exercise, before later cells are run. So their checks can pass even
    if a later cell defines a helper of the same name, or another version of the piece, only to try something.

    Args:
        cells: The cells that are loaded.
        names: The grade_ids of the exercise's cells.
        piece: The function or class that the exercise asks for.
    """
    end = 1 + max((index for index, cell in enumerate(cells) if cell["grade_id"] in names), default=-1)
    earlier = [cell for cell in cells[:end] if cell["grade_id"]]
    used = {piece}.union(*(static_checks.used_by(cell["source"]) for cell in earlier))
    lent = {name for cell in earlier for name in static_checks.lends(cell["source"])}
    redefined = {
        name
        for cell in cells[end:]
        if cell["grade_id"]
        for name in static_checks.lends(cell["source"])
        if name != piece or "lends" in cell  # A later exercise may continue a class.
    }
    return cells[:end] if used & lent & redefined else []


def without_asserts(cells: list[dict]) -> list[dict]:
    """Return the cells without the assertions at the top level of the student's cells."""
    return [
        _without([each.statement for each in _parsed(cell) if isinstance(each.statement, ast.Assert)], cell)
        if cell["grade_id"]
        else cell
        for cell in cells
    ]


def without_examples(cells: list[dict]) -> list[dict]:
    """Return the cells without the student's top-level code that only tries an exercise.

    Such code uses the student's functions, torch.distributed, or a result of these. It is left out, unless it changes
    a variable that a function, a class or one of the lab's own cells uses.
    """
    variables = _variables_in([cell for cell in cells if cell["grade_id"]])
    bodies = [_parsed(cell, variables) if cell["grade_id"] else [] for cell in cells]
    everything = [each for body in bodies for each in body]
    wanted = {name for cell in cells if not cell["grade_id"] for each in _parsed(cell) for name in each.used}
    defined = (each.names for each in everything if isinstance(each.statement, _DEFINITIONS))
    kept = {*mine.needed_for(wanted.union(*defined), everything)}
    tried = {"dist"}.union(*(each.names for each in kept if isinstance(each.statement, FUNCTIONS_AND_CLASSES)))
    examples = set()
    for each in everything:
        if each not in kept and (isinstance(each.statement, ast.Assert) or each.used & tried):
            tried |= each.names
            examples.add(each)
    return [
        _without([each.statement for each in body if each in examples], cell)
        for cell, body in zip(cells, bodies, strict=True)
    ]


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _parsed(cell: dict, variables: Collection[str] = ()) -> list[Definition]:
    """Return a cell's top-level statements, or none if it does not compile."""
    try:
        return mine.definitions_in(cell["source"], variables)
    except static_checks.NOT_CODE:
        return []


def _variables_in(cells: list[dict]) -> set[str]:
    """Return the names that statements define, except for imports, functions and classes."""
    statements = [each.statement for cell in cells for each in _parsed(cell)]
    return {name for each in statements if not isinstance(each, _DEFINITIONS) for name in bound_by(each)}


def _names_beside(definition: Definition, own: set[str]) -> frozenset[str]:
    """Return the names for which a definition counts, except for these. "*" means that it always counts."""
    if _is_future(definition.statement):
        return frozenset("*")
    if isinstance(definition.statement, ast.Import) and any("." in name for name in definition.names):
        return definition.names  # `import torch.fx` adds to `torch`, which the lab's own cells import.
    return definition.names - own if definition.new_names - own else frozenset()


def _without(nodes: list[ast.stmt], cell: dict) -> dict:
    """Return a cell in which `pass` replaces each of these statements. The other lines keep their numbers."""
    lines = [line.encode() for line in cell["source"].split("\n")]  # Columns are counted in bytes.
    for node in reversed(nodes):
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        rest = lines[last][node.end_col_offset :]
        lines[first : last + 1] = [lines[first][: node.col_offset] + b"pass" + rest, *[b""] * (last - first)]
    return cell | {"source": b"\n".join(lines).decode()}
