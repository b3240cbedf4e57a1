"""Remember what a notebook's cells define on the ranks, so that it can be defined again after the ranks restart.

Imports, functions, classes and simple assignments depend only on each other, so they can be run again at any time.
Any other statement that binds a name computes its value, perhaps together with the other ranks, so it is not run again.
"""

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass, field

from IPython.core.inputtransformer2 import TransformerManager

from shared.ranks.continued import continues_a_class

_READY = {"torch", "dist", "rank", "world_size", "device", *dir(builtins)}  # every cell can use these names
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ACTS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, *_COMPREHENSIONS)
_NAMES_SHOWN = 5


@dataclass
class Cell:
    """A cell that ran on the ranks, and which of its statements are still the latest definitions of some names."""

    source: str
    targets: list[int] | None  # the ranks that ran it; None for all of them
    names: dict[int, set[str]] = field(default_factory=dict)  # by the statement's index in the cell
    imports: set[int] = field(default_factory=set)  # the indices of statements that import
    continued: dict[int, set[str]] = field(default_factory=dict)  # what `class Name(Name):` defines, by the same index

    @property
    def main_names(self) -> list[str]:
        """The names that the cell defines, or those that it imports if it defines no others."""
        chosen = set(self.names) - self.imports or self.names
        return [name for index in sorted(chosen) for name in sorted(self.names[index])]

    def for_rank(self, rank: int) -> tuple[str, list[int]]:
        """Return the source, and the indices of the statements that this rank has to run again."""
        return self.source, sorted(self.names) if self.targets is None or rank in self.targets else []


class Definitions:
    """Remembers the latest definition of each name, in the order in which the cells ran."""

    def __init__(self):
        self.cells: list[Cell] = []
        self.computed: dict[str, None] = {}  # names that cells have computed, in order

    def remember(self, source: str, targets: list[int] | None) -> None:
        """Remember what a cell defines, before it runs. Names that the cell computes no longer have a definition."""
        try:
            statements = ast.parse(TransformerManager().transform_cell(source)).body
        except SyntaxError:
            return
        cell = Cell(source, targets)
        for index, statement in enumerate(statements):
            names = _defined_by(statement, self._known(cell))
            for name in names or bound_by(statement):
                if not names or name not in _used_by(statement):  # `class Name(Name):` needs the earlier one
                    self._forget(name, cell)
                self.computed.pop(name, None)
                if not names:
                    self.computed[name] = None
            if continues_a_class(statement):
                cell.continued[index] = {name for part in statement.body for name in bound_by(part)}
                self._forget_replaced(statement.name, cell.continued[index], cell)
            if names:
                cell.names[index] = names
                if isinstance(statement, (ast.Import, ast.ImportFrom)):
                    cell.imports.add(index)
        if cell.names:
            self.cells = [other for other in self.cells if other.names] + [cell]

    def _known(self, cell: Cell) -> set[str]:
        return {name for each in (*self.cells, cell) for names in each.names.values() for name in names}

    def _forget(self, name: str, cell: Cell) -> None:
        """Forget the definitions of a name that a cell replaces on all ranks that have them."""
        for other in (*self.cells, cell):
            if cell.targets in (None, other.targets):
                for index in [index for index, names in other.names.items() if name in names]:
                    other.names[index].discard(name)
                    if not other.names[index]:
                        del other.names[index]

    def _forget_replaced(self, name: str, replacing: set[str], cell: Cell) -> None:
        """Forget where a class was continued with methods that a cell now defines again."""
        for other in self.cells:
            if cell.targets in (None, other.targets):
                for index, replaced in other.continued.items():
                    if replaced <= replacing and name in other.names.get(index, ()):
                        del other.names[index]


def describe_restart(again: list[Cell], failed: list[tuple[Cell, str]], computed: list[str]) -> str:
    """Describe what is left after a restart, and which cells must be run again.

    Args:
        again: The cells whose definitions were run again.
        failed: The cells for which that failed, with the reasons.
        computed: The names of the variables that are gone.
    """
    if not again and not failed:
        return "The ranks had to be restarted, and their variables are gone. Run the cells that define them again."
    sentences = ["The ranks had to be restarted."]
    if again:
        with_own = [cell for cell in again if set(cell.names) - cell.imports] or again
        names = [name for cell in with_own for name in cell.main_names]
        sentences.append(f"Your definitions were run again: {_list(names)}.")
    for cell, why in failed:
        defining = _list(cell.main_names)
        sentences.append(f"The cell that defines {defining} failed when it was run again, so run it yourself: {why}")
    if computed:
        sentences.append(f"Computed variables are gone: {_list(computed)}. Run the cells that compute them again.")
    return " ".join(sentences)


def _list(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_NAMES_SHOWN])} and {more} more"


def _defined_by(statement: ast.stmt, known: set[str]) -> set[str]:
    """Return the names that a statement defines, or an empty set if it is not a definition."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        origin = "." * getattr(statement, "level", 0) + (getattr(statement, "module", "") or "")
        return {f"{origin}.*" if name.name == "*" else name.asname or name.name for name in statement.names}
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        only_names = not any(isinstance(part, (ast.Attribute, ast.Subscript)) for each in targets for part in _in(each))
        if only_names and _is_simple(statement.value, _READY | {name.split(".")[0] for name in known}):
            return set(bound_by(statement))
    return set()


def _used_by(definition: ast.stmt) -> set[str]:
    """Return the names that a definition uses when it runs, such as those of base classes."""
    if isinstance(definition, ast.ClassDef):
        used = [*definition.decorator_list, *definition.bases, *definition.keywords]
    elif isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        used = [*definition.decorator_list, definition.args]
    else:
        used = filter(None, [getattr(definition, "value", None)])
    return {part.id for each in used for part in ast.walk(each) if isinstance(part, ast.Name)}


def _is_simple(value: ast.expr, known: set[str]) -> bool:
    """Return whether a value consists of constants and definitions, so that it calls nothing."""
    parts = list(_in(value))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names <= known and not any(isinstance(part, _ACTS) for part in parts)


def bound_by(statement: ast.stmt) -> list[str]:
    """Return the names that a statement binds or deletes in the namespace of the cell."""
    names = []
    for part in _in(statement):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            names.append(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(part.name)
        elif isinstance(part, ast.alias):
            names.append(part.asname or part.name)
    return names


def _in(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and the nodes in it, without those in the scopes of functions, classes and comprehensions."""
    yield node
    if not isinstance(node, (*_SCOPES, *_COMPREHENSIONS)):
        for child in ast.iter_child_nodes(node):
            yield from _in(child)
