"""Accept only data from ranks, so that a student's code on a rank cannot run anything in the judge's process.

A rank sends its results as a pickle, and a pickle can call any function that it names. Here, a pickle may therefore
name only a few containers, tensors, and the course's own record types. Everything else is rejected. Results that are
packed by `parcel` contain nothing else, so whoever sends something else has gone round it.
"""

import contextlib
import dataclasses
import functools
import io
import pickle
from typing import ClassVar

import torch

from shared.checks.engine import parcel

OWN = "shared."
MOST_NESTED = 2  # An answer holds an outcome, which holds a pickle of its value.
NOT_SENT = ("shared.checks.engine.framework.", "shared.checks.engine.verdicts.")  # Verdicts are made of these.


class Rejected(pickle.UnpicklingError):
    """A rank sent something that is not plain data."""


def install() -> list[str]:
    """Restrict all pickles that this process loads from now on. Returns a list to which rejected names are added."""
    rejected: list[str] = []

    class DataOnly(pickle._Unpickler):  # The version in C has no load_build to override.
        dispatch: ClassVar[dict] = dict(pickle._Unpickler.dispatch)

        def load_build(self):
            """Reject a state for a class or a function. It could replace a class's methods, such as __eq__."""
            owner = self.stack[-2]  # pyright: ignore[reportAttributeAccessIssue] (not in the stub of pickle)
            if isinstance(owner, type) or callable(owner):
                rejected.append(f"setattr({getattr(owner, '__name__', type(owner).__name__)})")
                raise Rejected(rejected[-1])
            super().load_build()  # pyright: ignore[reportAttributeAccessIssue] (not in the stub of pickle)

        dispatch[pickle.BUILD[0]] = load_build

        def find_class(self, module: str, name: str):
            found = _allowed(module, name, super().find_class)
            if found is None:
                rejected.append(f"{module}.{name}")
                raise Rejected(f"{module}.{name}")
            return found

    depth = 0

    def loads(packed, /, **_):
        nonlocal depth
        # Each level can hold many pickles that share their bytes, so loading a small pickle could take days.
        if depth == MOST_NESTED:
            rejected.append("pickle.loads recursively")
            raise Rejected(rejected[-1])
        depth += 1
        try:
            with contextlib.suppress(NotSimple):
                return Simple(io.BytesIO(packed)).load()
            return DataOnly(io.BytesIO(packed)).load()
        finally:
            depth -= 1

    pickle.loads = parcel.unpack = loads
    return rejected


class Simple(pickle.Unpickler):
    """Loads pickles of numbers, strings, lists, dicts, tensors and records, much faster than `DataOnly`.

    A pickle could set attributes of a class or a function that it names. To prevent this, it gets a stand-in for each
    of them, and it cannot set the attributes of a stand-in.
    """

    def find_class(self, module: str, name: str):
        found = _allowed(module, name, super().find_class)
        if isinstance(found, torch.dtype):
            return found
        bases = found.__mro__ if isinstance(found, type) and dataclasses.is_dataclass(found) else ()
        is_record = bases and not any("__call__" in vars(base) for base in bases)
        if is_record or module == parcel.__name__:
            return _maker_of(found)
        raise NotSimple


class NotSimple(pickle.UnpicklingError):
    """A pickle contains something that only `DataOnly` can load or reject."""


class WithoutState(type):
    """The type of stand-ins, which are classes whose attributes a pickle cannot set."""

    def __setstate__(cls, state):
        raise NotSimple


@functools.cache
def _maker_of(found) -> type:
    """Return a stand-in for a type of records, or for a function of `parcel`. Calling it returns what they return."""

    def create(_, *args):
        return found.__new__(found, *args) if isinstance(found, type) else found(*args)

    return WithoutState(found.__name__, (), {"__new__": create})


def _allowed(module: str, name: str, find):
    """Return the object that a pickle names, or None if the pickle may not use it."""
    if name in parcel.PLAIN.get(module, ()):
        return find(module, name)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if (module, name) == ("torch.storage", "_load_from_bytes"):  # This is a pickle within a pickle.
        return lambda packed: torch.load(io.BytesIO(packed), weights_only=True)
    if module.startswith(OWN) and "." not in name and not f"{module}.".startswith(NOT_SENT):
        found = find(module, name)
        return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
    return None
