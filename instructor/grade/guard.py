"""Take from ranks what is data, and nothing that could run code here: the judge's own process must stay its own.

What a rank gives back arrives as a pickle, and a pickle may call any function that it names. A student's code could
send one. So a pickle may name a few containers here, tensors, and the course's own records; all else is refused.
"""

import dataclasses
import io
import pickle
from typing import ClassVar

import torch

from shared.checks.engine import parcel

PLAIN = {
    "builtins": ("set", "frozenset", "complex", "slice", "range", "bytearray"),
    "collections": ("OrderedDict", "Counter", "defaultdict", "deque"),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "shared.checks.engine.parcel": ("_tensor",),
}
OWN = "shared."
NOT_SENT = ("shared.checks.engine.framework.", "shared.checks.engine.verdicts.")  # what verdicts are made of


class Refused(pickle.UnpicklingError):
    """A rank sent something that is not data."""


def install() -> list[str]:
    """Read every pickle of this process so, from now on. → the names refused, a list that grows"""
    refused: list[str] = []

    class DataOnly(pickle._Unpickler):  # the one in Python: that in C lets nobody see what is built
        dispatch: ClassVar = dict(pickle._Unpickler.dispatch)

        def load_build(self):
            """A state given to a class would set its methods, and a record might then equal whatever it meets."""
            owner = self.stack[-2]
            if isinstance(owner, type) or callable(owner):
                refused.append(f"setattr({getattr(owner, '__name__', type(owner).__name__)})")
                raise Refused(refused[-1])
            super().load_build()

        dispatch[pickle.BUILD[0]] = load_build

        def find_class(self, module: str, name: str):
            found = _allowed(module, name, super().find_class)
            if found is None:
                refused.append(f"{module}.{name}")
                raise Refused(f"{module}.{name}")
            return found

    def loads(packed, /, **_):
        return DataOnly(io.BytesIO(packed)).load()

    pickle.loads = parcel.unpack = loads
    return refused


def _allowed(module: str, name: str, find):
    """→ what a pickle asks for by name, or None"""
    if name in PLAIN.get(module, ()):
        return find(module, name)
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    if (module, name) == ("torch.storage", "_load_from_bytes"):  # a pickle within a pickle
        return lambda packed: torch.load(io.BytesIO(packed), weights_only=True)
    if module.startswith(OWN) and "." not in name and not f"{module}.".startswith(NOT_SENT):
        found = find(module, name)
        return found if isinstance(found, type) and dataclasses.is_dataclass(found) else None
    return None
