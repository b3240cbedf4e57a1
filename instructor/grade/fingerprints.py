"""Notice when a student's code replaces what measures it: the functions of a rank, as digests.

A piece runs in the same process as the probes that count its bytes. It could put functions of its own in their place.
So the judge takes a rank's fingerprints before the piece is loaded, and again after each exercise.
"""

import hashlib
import importlib
import sys
from types import BuiltinFunctionType, CodeType, FunctionType

from torch.optim import Optimizer

COURSE = ("shared", "instructor")
WATCHED = ("torch", "torch.distributed", "torch.distributed.distributed_c10d", "torch.testing", "builtins", "time")
CLASSES = (("torch", "Tensor"),)
# Torch wraps the step() of an optimizer's class when its first instance is made: that is no tampering.
STEP_WRAPPERS = [code for code in Optimizer.profile_hook_step.__code__.co_consts if isinstance(code, CodeType)]


def take(module: str) -> dict[str, str]:
    """→ the digest of each function, by its name, in the course's modules and in what probes call of torch

    module: imported first, with all that it needs, so that every probe is there.
    """
    importlib.import_module(module)
    found: dict[str, str] = {}
    names = [name for name in sys.modules if name.split(".")[0] in COURSE or name in WATCHED]
    for name in sorted(names):
        for attribute, value in list(vars(sys.modules[name]).items()):
            if issubclass(type(value), type) and value.__module__.split(".")[0] in COURSE:
                found |= _methods(f"{name}.{attribute}", value)
            elif digest := _digest(value):
                found[f"{name}.{attribute}"] = digest
    for name, attribute in CLASSES:
        found |= _methods(f"{name}.{attribute}", getattr(sys.modules[name], attribute))
    return found


def replaced(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """→ the names whose function is another now, or gone"""
    return sorted(name for name, digest in before.items() if after.get(name) != digest)


def _methods(name: str, owner: type) -> dict[str, str]:
    found = {}
    for attribute, value in list(vars(owner).items()):
        plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        plain = plain.fget if isinstance(plain, property) else plain
        if digest := _digest(plain):
            found[f"{name}.{attribute}"] = digest
    return found


def _digest(value) -> str:
    """By type(), since isinstance() asks the value itself, and torch keeps some that warn when they are asked."""
    if type(value) is FunctionType:
        if value.__code__ in STEP_WRAPPERS:
            return _digest(value.__wrapped__)
        return hashlib.sha256(repr(_of_code(value.__code__)).encode()).hexdigest()[:16]
    if type(value) is BuiltinFunctionType:
        return f"builtin {value.__module__}.{value.__qualname__}"
    return type(value).__name__ if type(value).__name__ in ("method_descriptor", "getset_descriptor") else ""


def _of_code(code: CodeType) -> tuple:
    """What a function does, the same in each process: sets have an order of their own in each."""
    return code.co_code, code.co_names, code.co_freevars, code.co_varnames, [*map(_of_constant, code.co_consts)]


def _of_constant(constant):
    if isinstance(constant, CodeType):
        return _of_code(constant)
    return sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
