"""Your own pieces from earlier labs, in place of ours:

    from shared.mine import broadcast_state    # instead of: from solutions.manual_ddp import broadcast_state

When all checks of an exercise pass in a lab that is open in JupyterLab, its piece is saved into mine/, together with
the definitions in your notebook that the piece uses. Later labs can import it from here. In grading, imports from here
give you our pieces, as imports from solutions do, so a mistake in an early lab does not cost points in a later one.
"""

import ast
import importlib.util
import itertools
import symtable
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from IPython.core.inputtransformer2 import TransformerManager

from shared.ranks.continued import continues_a_class
from shared.ranks.definitions import bound_by

ROOT = Path(__file__).resolve().parents[1]
_HEADER = '''"""Your pieces of this lab whose checks have passed. `from shared.mine import NAME` imports them."""

import torch
import torch.distributed as dist
'''
_HEADER_STATEMENTS = 3
FUNCTIONS_AND_CLASSES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_OF_THE_NOTEBOOK = {"rank": "dist.get_rank()", "world_size": "dist.get_world_size()", "device": "tensor.device"}


class NotSaved(Exception):
    """A piece cannot be used in another notebook; the message says why."""


@dataclass(frozen=True, eq=False)
class Definition:
    """A top-level statement, the names that it defines or whose values it changes, and the names that it looks up."""

    statement: ast.stmt
    source: str
    names: frozenset[str]
    used: frozenset[str]

    @classmethod
    def of(cls, statement: ast.stmt, source: str, variables: Collection[str]) -> "Definition":
        bound = bound_by(statement)
        names = {*bound, *(name.split(".")[0] for name in bound), *_changed_by(statement, variables)}
        if continues_a_class(statement):
            names |= {f"{statement.name}.{name}" for part in statement.body for name in bound_by(part)}
        used = frozenset(_globals_in(symtable.symtable(source, "cell", "exec")))
        return cls(statement, source, frozenset(names), used)

    @property
    def line(self) -> int:
        """The line of its cell with which it begins."""
        return _first_line(self.statement)

    @property
    def new_names(self) -> frozenset[str]:
        """The names without that of a class which it only continues."""
        statement = self.statement
        return self.names - {statement.name} if continues_a_class(statement) else self.names

    @property
    def is_import(self) -> bool:
        return isinstance(self.statement, (ast.Import, ast.ImportFrom))


def save(module: str, piece: str, cells: list) -> None:
    """Save a piece that has passed its checks, with the definitions that it uses, into mine/<module>.py.

    Args:
        module: The module of solutions/ that the lab builds.
        piece: The name of the class or function.
        cells: What the notebook's cells define on the ranks, as `shared.ranks.definitions.Cell`s.

    Raises:
        NotSaved: If the piece works only in its notebook.
        OSError: If the file cannot be written.
    """
    needed = _saved_with(piece, [definition for cell in cells for definition in _of_cell(cell)])
    path = ROOT / "mine" / f"{module}.py"
    earlier = definitions_in(path.read_text(encoding="utf-8"))[_HEADER_STATEMENTS:] if path.exists() else []
    path.parent.mkdir(exist_ok=True)
    beside = path.with_suffix(".new")
    sources = [_HEADER, *(definition.source for definition in _merged(earlier, needed))]
    beside.write_text("\n\n".join(sources) + "\n", encoding="utf-8")
    beside.replace(path)


def _globals_in(scope: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a scope, or one inside it, looks up in the notebook's namespace."""
    for symbol in scope.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or scope.get_type() == "module"):
            yield symbol.get_name()
    for inner in scope.get_children():
        yield from _globals_in(inner)


def _changed_by(statement: ast.stmt, variables: Collection[str]) -> Iterator[str]:
    """Yield the variables that a statement changes by setting attributes or elements, or by calling their methods."""
    if not isinstance(statement, FUNCTIONS_AND_CLASSES):
        for node in ast.walk(statement):
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                yield _variable_of(node)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        yield from {_variable_of(statement.value.func)}.intersection(variables)


def _variable_of(target: ast.AST) -> str:
    """Return the variable to which an attribute or an element belongs, or ""."""
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _of_cell(cell) -> list[Definition]:
    """Return the definitions of a cell that no later cell has replaced."""
    found = definitions_in(TransformerManager().transform_cell(cell.source))
    return [found[index] for index in sorted(cell.names)]


def definitions_in(source: str, variables: Collection[str] = ()) -> list[Definition]:
    """Return the top-level statements of some code.

    Args:
        source: The code.
        variables: The names whose values may change if one of their methods is called, unlike `torch.manual_seed(0)`.

    Raises:
        SyntaxError: If it is not valid Python.
    """
    lines, statements = source.split("\n"), ast.parse(source).body
    shared = {one.end_lineno for one, other in itertools.pairwise(statements) if one.end_lineno == other.lineno}
    found = []
    for statement in statements:
        first = _first_line(statement)
        own = "\n".join(lines[first - 1 : statement.end_lineno])
        own = ast.unparse(statement) if {first, statement.end_lineno} & shared else own
        found.append(Definition.of(statement, own, variables))
    return found


def names_in(source: str) -> set[str]:
    """Return the names that some code defines."""
    return {name for each in definitions_in(source) for name in each.new_names}


def _first_line(statement: ast.stmt) -> int:
    return min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))


def needed_for(wanted: set[str], definitions: list[Definition]) -> list[Definition]:
    """Return the statements that define or change these names, or names that such statements use, in their order."""
    needed: list[Definition] = []
    while True:
        found = [each for each in definitions if "*" in each.names or each.names & wanted]
        if found == needed:
            return found
        needed, wanted = found, wanted.union(*(each.used for each in found))


def _saved_with(piece: str, definitions: list[Definition]) -> list[Definition]:
    """Return the definitions that a piece uses and its own.

    Raises:
        NotSaved: If no cell defines the piece, or a definition uses a variable that only a notebook has.
    """
    needed = needed_for({piece}, definitions)
    if not any(piece in each.names for each in needed):
        raise NotSaved(f"no cell defines {piece} on the ranks")
    missing = {name for each in needed for name in each.used}.difference(*(each.names for each in needed))
    if only_here := sorted({*_OF_THE_NOTEBOOK} & missing):
        instead = " and ".join(_OF_THE_NOTEBOOK[name] for name in only_here)
        verbs = ("exists", "works") if len(only_here) == 1 else ("exist", "work")
        names = " and ".join(only_here)
        raise NotSaved(f"it uses {names}, which {verbs[0]} only in %%ranks cells; {instead} {verbs[1]} everywhere")
    return needed


def _merged(earlier: list[Definition], newer: list[Definition]) -> list[Definition]:
    """Replace earlier definitions with newer ones of the same names, in their place, and append the others."""
    merged, left = [], list(newer)
    for old in earlier:
        replacing = [each for each in newer if each.names & old.names]
        merged += [each for each in replacing if each in left] if replacing else [old]
        left = [each for each in left if each not in replacing]
    return merged + left


def _load(path: Path) -> ModuleType:
    """Import a file of mine/, at most once."""
    name = f"mine.{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None  # None stands for a file that is no Python
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def __getattr__(name: str):
    """Import a saved piece.

    Raises:
        ImportError: If no piece of that name was saved.
    """
    if name.startswith("_"):  # Python and IPython look for such names in every module
        raise AttributeError(name)
    files = sorted((ROOT / "mine").glob("*.py"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        if any(name in each.names and not each.is_import for each in definitions_in(path.read_text(encoding="utf-8"))):
            return getattr(_load(path), name)
    raise ImportError(
        f"There is no {name} in mine/. It is saved there when all checks of its exercise pass in a lab in JupyterLab. "
        "Until then, import ours from solutions, as the lab does."
    )
