"""Pickle the results of a probe as plain data, with plain tensors as their raw bytes.

torch pickles each tensor with a whole torch.save(), which takes about 0.2 ms. A probe returns hundreds of tensors.

A result may contain only the types that are named here, so that a program which judges the code of others can load it
and nothing else. NumPy's scalars become Python's, and an instance of a student's own subclass of a list or a number
becomes a list or a number. Everything else is rejected on the rank.
"""

import io
import pickle
from typing import Any

import numpy as np
import torch

from shared.ranks.pickles import CpuPickler

PLAIN = {
    "builtins": ("set", "frozenset", "complex", "slice", "range", "bytearray"),
    "collections": ("OrderedDict", "Counter", "deque"),
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    __name__: ("_tensor", "_array", "_plain"),
}
_OURS = ("shared", "torch")  # packages with types that only the checks put into a result
_BASES = (int, float, complex, str, bytes, tuple, list, dict, set, frozenset)
_NUMERIC = "biufc"  # the kinds of NumPy's dtypes whose values are numbers


class _Packer(CpuPickler):
    def reducer_override(self, thing):
        if isinstance(thing, torch.Tensor):
            return self._tensor_or_more(thing)
        if isinstance(thing, np.ndarray) and thing.dtype.kind in _NUMERIC:
            return _array, (thing.tobytes(), thing.dtype.str, thing.shape)
        kind: Any = thing if hasattr(thing, "__qualname__") else type(thing)  # Classes and functions have this name.
        if kind.__qualname__ in PLAIN.get(kind.__module__, ()) or str(kind.__module__).split(".")[0] in _OURS:
            return NotImplemented
        plain: Any = thing.item() if isinstance(thing, np.generic) else thing
        base: Any = next((base for base in _BASES if isinstance(plain, base)), None)
        if base is None:  # np.longdouble and dates have no equivalent in Python, and other objects might be anything
            raise TypeError(
                f"the result contains a {type(thing).__name__}, which cannot be compared with the right values: "
                "return only tensors, numbers, strings, lists, tuples and dicts"
            )
        return _plain, (plain if type(plain) is bool else base(plain),)

    def _tensor_or_more(self, tensor: torch.Tensor):
        if type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout is not torch.strided:
            return super().reducer_override(tensor)
        if tensor.is_meta or tensor.numel() == 0:
            return super().reducer_override(tensor)
        flat = tensor.cpu().contiguous().view(-1)
        return _tensor, (flat.view(torch.uint8).numpy().tobytes(), tensor.dtype, tuple(tensor.shape))


def _tensor(memory: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(bytearray(memory), dtype=dtype).view(shape)


def _array(memory: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(bytearray(memory), dtype=dtype).reshape(shape)


def _plain(value):
    return value


def pack(found) -> bytes:
    """Pickle the result of a probe. Its tensors are on the CPU when they are loaded.

    Raises:
        TypeError: If it contains an object of any other type.
    """
    stream = io.BytesIO()
    _Packer(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(found)
    return stream.getvalue()


unpack = pickle.loads
