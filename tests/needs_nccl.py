"""Which notebooks need NCCL on GPUs, read from their sources, and from those of the checks that they run.

Ranks that share GPUs use gloo, which cannot send or receive a tensor on a GPU. A DeviceMesh on GPUs needs NCCL, too.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOLUTIONS, CHECKS = ROOT / "solutions", ROOT / "shared" / "checks"
POINT_TO_POINT = ("send", "recv", "isend", "irecv", "P2POp", "batch_isend_irecv")
OBJECTS = ("send_object_list", "recv_object_list")
_SENDING = frozenset(f"dist.{name}" for name in (*POINT_TO_POINT, *OBJECTS))
MESHES = ("DeviceMesh", "init_device_mesh", "fully_shard")
ASKS_FIRST = "exchanges_directly"  # a piece that calls it uses the backend's own collective on a GPU


def needs_nccl(source: str) -> bool:
    """Tell whether a notebook's source, or a check that it imports, runs on GPUs only with NCCL."""
    names = _imported_from(source, "shared.checks")
    return uses_point_to_point(source) or uses_a_mesh(source) or any(check_needs_nccl(name) for name in names)


@functools.cache
def check_needs_nccl(name: str) -> bool:
    """Tell whether the checks of a module of solutions/ send tensors or create a DeviceMesh themselves."""
    found = (_names_in(ast.parse(path.read_text())) for path in (CHECKS / name).glob("*.py"))
    return any(not names.isdisjoint((*_SENDING, *MESHES)) for names in found)


def uses_point_to_point(source: str) -> bool:
    """Tell whether a notebook's source sends tensors from rank to rank, itself or through our solutions."""
    return _uses(source, _SENDING)


def uses_a_mesh(source: str) -> bool:
    """Tell whether a notebook's source creates a DeviceMesh, itself or through our solutions."""
    return _uses(source, frozenset(MESHES))


def _imported_from(source: str, package: str) -> list[str]:
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [alias.name for node in imports if node.module == package for alias in node.names]


def _uses(source: str, names: frozenset[str]) -> bool:
    return not _names_in(ast.parse(source)).isdisjoint(names | _pieces_that_use(names))


@functools.cache
def _pieces_that_use(names: frozenset[str]) -> frozenset[str]:
    """Return the functions and classes in solutions/ that use one of the names, themselves or through another piece."""
    pieces = {
        node.name: _names_in(node)
        for path in SOLUTIONS.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    found: set[str] = set()
    while more := {
        piece
        for piece, used in pieces.items()
        if piece not in found and ASKS_FIRST not in used and not used.isdisjoint(names | found)
    }:
        found |= more
    return frozenset(found)


def _names_in(tree: ast.AST) -> set[str]:
    """Return the names that code uses. What it takes from torch.distributed is called `dist.send`, and so on."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(f"dist.{node.attr}" if ast.unparse(node.value) in ("dist", "torch.distributed") else node.attr)
        elif isinstance(node, ast.ImportFrom):
            prefix = "dist." if node.module == "torch.distributed" else ""
            names.update(f"{prefix}{alias.name}" for alias in node.names)
    return names
