"""Detect whether a student's code has replaced functions that measure it, by comparing digests of functions on a rank.

A student's code runs in the same process as the probes that count its bytes, so it could replace their functions. The
judge therefore takes a rank's fingerprints before it loads the code, and again after each exercise.
"""

import hashlib
import importlib
import sys
from functools import cache, partial
from operator import itemgetter
from types import BuiltinFunctionType, CellType, CodeType, FunctionType

from torch.optim import Optimizer

COURSE = ("shared", "instructor")
WATCHED = ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.testing", "builtins", "time")
CLASSES = (("torch", "Tensor"),)
WRAPPERS = (partial, type(cache(len)))
CLASS = "class"  # stands for the digest of a class of the course
# Torch wraps the step() of an optimizer class when its first instance is created. That is not tampering.
STEP_WRAPPERS = [code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType)]


def take_afresh(source: str, module: str) -> dict[str, str]:
    """Do what `take` does, but with functions that are created from this module's source for this call only.

    A student's code may have replaced the functions of this module on the rank.
    """
    namespace: dict = {}
    exec(source, namespace)
    return namespace["take"](module)


def take(module: str) -> dict[str, str]:
    """Return a digest for each function, by name, of the course's modules and of the parts of torch that probes call.

    Args:
        module: The module of checks. It is imported first, with all that it needs, so that every probe is loaded.
    """
    importlib.import_module(module)
    found: dict[str, str] = {}
    names = [name for name in sys.modules if name.split(".")[0] in COURSE or name in WATCHED]
    for name in sorted(names):
        for attribute, value in list(vars(sys.modules[name]).items()):
            if issubclass(type(value), type) and value.__module__.split(".")[0] in COURSE:
                found |= {f"{name}.{attribute}": CLASS} | _methods(f"{name}.{attribute}", value)
            elif digest := _digest(value):
                found[f"{name}.{attribute}"] = digest
    for name, attribute in CLASSES:
        found |= _methods(f"{name}.{attribute}", getattr(sys.modules[name], attribute))
    return found


def replaced(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names whose function has changed, is gone, or is new in a class of the course."""
    changed = {name for name, digest in before.items() if after.get(name) != digest}
    added = {name for name in after.keys() - before.keys() if before.get(name.rpartition(".")[0]) == CLASS}
    return sorted(changed | added)


def _methods(name: str, owner: type) -> dict[str, str]:
    found = {}
    for attribute, value in list(vars(owner).items()):
        function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        function = function.fget if isinstance(function, property) else function
        if digest := _digest(function):
            found[f"{name}.{attribute}"] = digest
    return found


def _digest(value) -> str:
    """Return a value's digest, or "" if it is not a function.

    This compares type(), because isinstance() also reads the value's __class__, and some values in torch then warn.
    """
    if type(value) is FunctionType:
        return hashlib.sha256(repr(_function_content(value, frozenset())).encode()).hexdigest()[:16]
    if type(value) in WRAPPERS:
        return _digest(_wrapped_by(value))
    if type(value) is BuiltinFunctionType:
        return f"builtin {value.__module__}.{value.__qualname__}"
    return type(value).__name__ if type(value).__name__ in ("method_descriptor", "getset_descriptor") else ""


def _function_content(function: FunctionType, outer: frozenset[int]) -> tuple:
    """Return what a function does: its code, its default values, and the functions in its closure.

    Args:
        outer: The ids of the functions that lead to this one. They are not followed again, since they may form a cycle.
    """
    if function.__code__ in STEP_WRAPPERS:
        function = function.__wrapped__
    inside = outer | {id(function)}
    defaults = function.__defaults__ or (), tuple(sorted((function.__kwdefaults__ or {}).items(), key=itemgetter(0)))
    enclosed = [content for content in map(_content_of, function.__closure__ or ()) if _is_function(content)]
    return _code_content(function.__code__), *(_value_content(each, inside) for each in (*defaults, tuple(enclosed)))


def _content_of(cell: CellType):
    """Return the value in a cell of a closure, or None if the cell is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _value_content(value, outer: frozenset[int]):
    """Return the content of a function, a tuple or a constant, or "" for any other value."""
    if type(value) is tuple:
        return [_value_content(each, outer) for each in value]
    if type(value) in WRAPPERS:
        return _value_content(_wrapped_by(value), outer)
    if type(value) is FunctionType and id(value) not in outer:
        return _function_content(value, outer)
    return repr(value) if type(value) in (bool, int, float, str, bytes) else ""


def _is_function(value) -> bool:
    return type(value) is FunctionType or type(value) in WRAPPERS


def _wrapped_by(wrapper):
    return wrapper.func if type(wrapper) is partial else wrapper.__wrapped__


def _code_content(code: CodeType) -> tuple:
    """Return what a function does, in a form that is the same in every process. Sets are sorted for that reason."""
    return code.co_code, code.co_names, code.co_freevars, code.co_varnames, [*map(_constant_content, code.co_consts)]


def _constant_content(constant):
    if isinstance(constant, CodeType):
        return _code_content(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
