"""Your own pieces from earlier labs, in place of ours:

    from shared.mine import broadcast_state    # instead of: from solutions.manual_ddp import broadcast_state

When all checks of an exercise pass in a lab that is open in JupyterLab, its piece is saved into mine/, together with
the definitions in your notebook that the piece uses. Later labs can import it from here. In grading, imports from here
give you our pieces, as imports from solutions do, so a mistake in an early lab does not cost points in a later one.
"""

import ast
import importlib.util
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from IPython.core.inputtransformer2 import TransformerManager

from shared.ranks.definitions import bound_by

ROOT = Path(__file__).resolve().parents[1]
_HEADER = '''"""Your pieces of this lab whose checks have passed. `from shared.mine import NAME` imports them."""

import torch
import torch.distributed as dist
'''
_HEADER_STATEMENTS = 3
_OF_THE_NOTEBOOK = {"rank": "dist.get_rank()", "world_size": "dist.get_world_size()", "device": "tensor.device"}


class NotSaved(Exception):
    """A piece cannot be used in another notebook; the message says why."""


@dataclass(frozen=True)
class Definition:
    """A statement that defines names: an import, a function, a class or an assignment."""

    names: frozenset[str]
    used: frozenset[str]
    source: str
    is_import: bool

    @classmethod
    def of(cls, statement: ast.stmt, lines: list[str]) -> "Definition":
        first = min(node.lineno for node in (statement, *getattr(statement, "decorator_list", [])))
        source = "\n".join(lines[first - 1 : statement.end_lineno])
        if statement.col_offset:  # it follows another statement on its line
            source = ast.unparse(statement)
        used = frozenset(_globals_in(symtable.symtable(source, "cell", "exec")))
        is_import = isinstance(statement, (ast.Import, ast.ImportFrom))
        return cls(frozenset(bound_by(statement)), used, source, is_import)


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
    needed = _needed_for(piece, [definition for cell in cells for definition in _of_cell(cell)])
    path = ROOT / "mine" / f"{module}.py"
    earlier = _statements(path.read_text(encoding="utf-8"))[_HEADER_STATEMENTS:] if path.exists() else []
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


def _of_cell(cell) -> list[Definition]:
    """Return the definitions of a cell that no later cell has replaced."""
    source = TransformerManager().transform_cell(cell.source)
    found = _statements(source)
    return [found[index] for index in sorted(cell.names)]


def _statements(source: str) -> list[Definition]:
    lines = source.splitlines()
    return [Definition.of(statement, lines) for statement in ast.parse(source).body]


def _needed_for(piece: str, definitions: list[Definition]) -> list[Definition]:
    """Return the definitions that a piece uses, directly or indirectly, and its own, in their order.

    Raises:
        NotSaved: If no cell defines the piece, or a definition uses a variable that only a notebook has.
    """
    wanted, needed = {piece}, []
    while True:
        found = [each for each in definitions if "*" in each.names or each.names & wanted]
        if found == needed:
            break
        needed, wanted = found, wanted.union(*(each.used for each in found))
    if not any(piece in each.names for each in needed):
        raise NotSaved(f"no cell defines {piece} on the ranks")
    for name in sorted(set(_OF_THE_NOTEBOOK) & wanted.difference(*(each.names for each in needed))):
        raise NotSaved(f"it uses {name}, a variable of this notebook; {_OF_THE_NOTEBOOK[name]} works everywhere")
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
        if any(name in each.names and not each.is_import for each in _statements(path.read_text(encoding="utf-8"))):
            return getattr(_load(path), name)
    raise ImportError(
        f"There is no {name} in mine/. It is saved there when all checks of its exercise pass in a lab in JupyterLab. "
        "Until then, import ours from solutions, as the lab does."
    )
