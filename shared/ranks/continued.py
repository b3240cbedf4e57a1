"""Let `class Name(Name):` in a cell add its methods to a class that an earlier cell has begun."""

import ast
import types
from collections.abc import Iterable, Iterator
from typing import TypeGuard

_NOT_MOVED = {"__module__", "__dict__", "__weakref__", "__annotations__", "_abc_impl"}
_DECORATOR = "__import__('shared.ranks.continued', fromlist=['continue_class']).continue_class"


class ContinueClasses(ast.NodeTransformer):
    """Makes `class Name(Name):` continue the class instead of deriving another one from it.

    A cell can therefore run any number of times: `super()` in its methods leads to the bases of the whole class, never
    to what the cell has defined before. Objects that already exist also get the new methods.
    """

    def visit_Module(self, module: ast.Module) -> ast.Module:
        for statement in module.body:
            if continues_a_class(statement):
                statement.decorator_list.insert(0, ast.parse(_DECORATOR, mode="eval").body)
        return module


def continues_a_class(statement: ast.stmt) -> TypeGuard[ast.ClassDef]:
    """Return whether a statement is a class whose only base has its own name."""
    if not isinstance(statement, ast.ClassDef) or statement.keywords or len(statement.bases) != 1:
        return False
    (base,) = statement.bases
    return isinstance(base, ast.Name) and base.id == statement.name


def continue_class(added: type) -> type:
    """Move everything that a class defines to its base, and return the base.

    A base that was imported stays as it is. In that case, the class itself is returned.
    """
    (whole,) = added.__bases__
    if whole.__module__ != added.__module__:
        return added
    own = {name: value for name, value in vars(added).items() if name not in _NOT_MOVED}
    if own.get("__doc__") is None:
        own.pop("__doc__", None)
    for closure_cell in _cells_in(own.values()):
        if closure_cell.cell_contents is added:  # super() and __class__ in a method refer to it
            closure_cell.cell_contents = whole
    for name, value in own.items():
        setattr(whole, name, value)
    whole.__annotations__ = {**vars(whole).get("__annotations__", {}), **vars(added).get("__annotations__", {})}
    return whole


def _cells_in(values: Iterable) -> Iterator[types.CellType]:
    """Yield the cells in the closures of functions, also of those inside properties, other methods and decorators."""
    left, seen = list(values), set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            filled = [each for each in value.__closure__ or () if _is_filled(each)]
            yield from filled
            left += [each.cell_contents for each in filled]
        elif isinstance(value, (classmethod, staticmethod)):
            left.append(value.__func__)
        elif isinstance(value, property):
            left += [value.fget, value.fset, value.fdel]


def _is_filled(closure_cell: types.CellType) -> bool:
    try:
        closure_cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
