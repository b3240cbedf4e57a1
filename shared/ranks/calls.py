"""Pack a function call for another process, even if the function is defined in a notebook.

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

import cloudpickle

_NOTEBOOK = "__main__"
_STATE = ("__defaults__", "__kwdefaults__", "__qualname__", "__annotations__", "__doc__")  # of a function


def pack(fn: Callable, args: tuple) -> bytes:
    """Return a call of fn(*args) as bytes."""
    packed = io.BytesIO()
    _Pickler(packed, pickle.HIGHEST_PROTOCOL).dump((fn, args))
    return packed.getvalue()


def unpack(packed: bytes) -> tuple[Callable, tuple]:
    """Return the function and its arguments."""
    return pickle.loads(packed)


class _Pickler(cloudpickle.Pickler):
    """Pickles by value the functions and classes that another process cannot import by their names.

    cloudpickle would give a function copies of the notebook's variables.
    """

    def reducer_override(self, obj):
        if not isinstance(obj, types.FunctionType) or _is_importable(obj):
            return super().reducer_override(obj)
        contents = [each.cell_contents for each in obj.__closure__ or ()]
        state = {name: getattr(obj, name) for name in _STATE}
        home = obj.__globals__.get("__name__", _NOTEBOOK)
        made_of = marshal.dumps(obj.__code__), obj.__name__, home, len(contents)
        return _empty_function, made_of, (contents, state, obj.__dict__), None, None, _fill_function


def _is_importable(function: types.FunctionType) -> bool:
    """Return whether another process finds this very function by its name."""
    found: Any = None if function.__module__ == _NOTEBOOK else sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _empty_function(code: bytes, name: str, home: str, cells: int) -> types.FunctionType:
    """Return a function with empty closure cells. A cell may contain the function itself, so they are filled later."""
    from IPython import get_ipython

    variables = get_ipython().user_ns if home == _NOTEBOOK else vars(importlib.import_module(home))
    return types.FunctionType(marshal.loads(code), variables, name, None, tuple(types.CellType() for _ in range(cells)))


def _fill_function(function: types.FunctionType, state: tuple) -> None:
    contents, attributes, own = state
    for name, value in attributes.items():
        setattr(function, name, value)
    for cell, content in zip(function.__closure__ or (), contents, strict=True):
        cell.cell_contents = content
    function.__dict__.update(own)
