"""The rank's side of a check: find the student's piece, give it to a probe."""

import importlib
import importlib.util
import sys
from pathlib import Path

import torch
from IPython import get_ipython

from shared.checks.engine import parcel
from shared.ranks import rankside
from shared.wire import instrumentation

SOLUTIONS = "solutions"  # the package that holds what earlier chapters built


class PieceMissing(Exception):
    """The piece is not defined where the check looks for it."""


def probe(names: tuple[str, ...], path: str | None, probe_fn, args: tuple) -> bytes:
    """Call probe_fn(the piece, *args) on this rank. → what it gives back, packed"""
    found = find(names, path)
    instrumentation.reset()  # so that a report counts this try's collectives from 1
    try:
        packed = parcel.pack(probe_fn(found, *args))
        if not torch.is_grad_enabled():
            raise AssertionError("it leaves gradients switched off: whatever comes next cannot be trained")
    finally:
        torch.set_grad_enabled(True)
    return packed


def find(names: tuple[str, ...], path: str | None):
    """Give back the student's object of the first of these names, from a file or from this rank's namespace.

    Raises: PieceMissing; AssertionError for a piece that is not the student's own.
    """
    namespace = get_ipython().user_ns if path is None else vars(_load(path))
    piece = next((name for name in names if name in namespace), None)
    if piece is None:
        index = "on the ranks: run the %%ranks cell that defines it" if path is None else f"in {Path(path).name}"
        raise PieceMissing(f"{names[0]} is not defined {index}")
    found = namespace[piece]
    origin = getattr(found, "__module__", "") or ""
    if origin.split(".")[0] in (SOLUTIONS, "torch"):
        raise AssertionError(f"{piece} comes from {origin}: write it by hand")
    return found


def device_here() -> torch.device:
    """Give back the device of this rank."""
    return torch.device(rankside.here.device)


def earlier_piece(module: str, name: str):
    """Return a piece of an earlier chapter as the course's own solution defines it, such as zero1's FlatParameters."""
    return getattr(importlib.import_module(f"{SOLUTIONS}.{module}"), name)


def names_in(path: str) -> list[str]:
    """List what a candidate's file defines."""
    return list(vars(_load(path)))


def _load(path: str):
    """Load a file as a fresh module, so that one probe leaves nothing behind for the next."""
    spec = importlib.util.spec_from_file_location("candidate", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module  # pickle and deepcopy look classes up by it
    spec.loader.exec_module(module)
    return module
