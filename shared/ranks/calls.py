"""Pack a call of a function for another process, also if the function is defined in a notebook.

Such a function is sent as code. On a rank, it uses the rank's variables, as if a `%%ranks` cell had defined it.
"""

import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

_NOTEBOOK = "__main__"
_OF_THE_CLASS = {"__dict__", "__weakref__", "_abc_impl"}  # what Python makes anew for each class


def pack(fn: Callable, args: tuple) -> bytes:
    """Return a call of fn(*args) as bytes."""
    packed = io.BytesIO()
    _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump((fn, args))
    return packed.getvalue()


def unpack(packed: bytes) -> tuple[Callable, tuple]:
    """Return the function and its arguments."""
    return pickle.loads(packed)


class _Pickler(pickle.Pickler):
    """Pickles by value the functions and classes that another process cannot import by their names."""

    def reducer_override(self, thing):
        if isinstance(thing, types.FunctionType) and not _is_importable(thing):
            cells = thing.__closure__ or ()
            contents = [each.cell_contents for each in cells]
            state = contents, thing.__defaults__, thing.__kwdefaults__, thing.__qualname__, thing.__dict__
            home = thing.__globals__.get("__name__", _NOTEBOOK)
            made_of = marshal.dumps(thing.__code__), thing.__name__, home, len(cells)
            return _empty_function, made_of, state, None, None, _fill_function
        if isinstance(thing, type) and thing.__module__ == _NOTEBOOK:
            attributes = {name: value for name, value in vars(thing).items() if name not in _OF_THE_CLASS}
            return _empty_class, (type(thing), thing.__name__, thing.__bases__), attributes, None, None, _fill_class
        return NotImplemented


def _is_importable(function: types.FunctionType) -> bool:
    """Return whether another process finds this very function by its name."""
    found: Any = None if function.__module__ == _NOTEBOOK else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _empty_function(code: bytes, name: str, home: str, cells: int) -> types.FunctionType:
    """Return a function of a module, or of this rank's shell, without what it encloses: that may be the function."""
    from IPython import get_ipython

    variables = get_ipython().user_ns if home == _NOTEBOOK else vars(importlib.import_module(home))
    return types.FunctionType(marshal.loads(code), variables, name, None, tuple(types.CellType() for _ in range(cells)))


def _fill_function(function: types.FunctionType, state: tuple) -> None:
    contents, function.__defaults__, function.__kwdefaults__, function.__qualname__, own = state
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
    function.__dict__.update(own)


def _empty_class(metaclass: type, name: str, bases: tuple[type, ...]) -> type:
    return types.new_class(name, bases, {"metaclass": metaclass})


def _fill_class(made: type, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(made, name, value)
