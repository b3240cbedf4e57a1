"""Find the student's class or function on a rank and call a probe with it."""

import contextlib
import copy
import functools
import importlib
import importlib.util
import io
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import torch
import torch.distributed as dist
from IPython import get_ipython
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.checks.engine import parcel
from shared.checks.engine.sizes import Sizes, models_of
from shared.guards.alarms import Alarm
from shared.ranks import rankside
from shared.wire import instrumentation, sent_bytes_of

SOLUTIONS = "solutions"  # the package with the modules that earlier chapters built
# What each rank says about one call of a probe: how many bytes it has sent, how many of them in reduce-scatters, and
# how many collectives it has called.
Report = tuple[float, float, int]
_formed: list[weakref.ref] = []  # the groups that the last probe formed


class PieceMissing(Exception):
    """The error for a piece that is not defined where the check looks for it."""


def error_of(call: Callable[[], object]) -> str:
    """Return the error that a call raises, as in "ValueError: …", or "". That of an unwritten piece is raised."""
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def value_error_of(call: Callable[[], object]) -> str:
    """Return the message of the ValueError that a call raises, or ""."""
    try:
        call()
    except ValueError as error:
        return str(error) or "a ValueError without a message"
    return ""


def probe(
    names: tuple[str, ...], path: str | None, probe_fn, args: tuple, width: int, times: int = 1
) -> tuple[bytes, Report]:
    """Call probe_fn(piece, *args) on this rank this many times, with models of this width.

    Returns:
        Its last result, pickled, and what the rank itself says it has sent.
    """
    _destroy_groups()
    found = find(names, path)
    before, gathers = _groups(), Alarm.gathers
    instrumentation.reset()  # so that a report counts the collectives of this attempt from 1
    try:
        # What the piece prints is shown, but torch's warnings are not.
        with (
            models_of(Sizes(width)),
            contextlib.redirect_stderr(io.StringIO()),
            instrumentation.listening() as calls,
        ):
            for _ in range(times - 1):
                probe_fn(found, *copy.deepcopy(args))
            packed = parcel.pack(probe_fn(found, *args))
        if not torch.is_grad_enabled():
            raise AssertionError("after the call, gradients are still disabled, so nothing after it can be trained")
    finally:
        torch.set_grad_enabled(True)
        _formed[:] = [weakref.ref(group) for group in _groups() if group not in before]
    return packed, _report_on(calls, Alarm.gathers - gathers)


def _report_on(calls: list[instrumentation.Call], gathers: int) -> Report:
    if not dist.is_initialized():  # A rank in no group only simulates calls.
        return 0.0, 0.0, 0
    rank = dist.get_rank()
    scattered = [call for call in calls if call.op.startswith("reduce_scatter")]
    sent_bytes, scattered_bytes = (sum(sent_bytes_of(call, rank) for call in some) for some in (calls, scattered))
    return sent_bytes, scattered_bytes, len(calls) + gathers


def _groups() -> list[dist.ProcessGroup]:
    """Return the process groups of this rank, in the order in which they were formed."""
    return list(dist.distributed_c10d._world.pg_map)


def _destroy_groups() -> None:
    """Destroy the groups that the last probe formed. Each one has threads, and memory on a GPU.

    The ranks do this when the next probe begins: by then, the kernel knows that all of them have left the last one.

    The name of most groups is a number. With NCCL, torch splits a mesh's groups off the group of all ranks, and derives
    each name from a hash of the group's ranks and from the number of groups. If such a group were destroyed, a new
    group could get the same name, and gloo would find the old group's addresses under that name in the store. So these
    groups, and all others of their probe, stay until the ranks form a new generation.
    """
    still_here = _groups()
    formed = [group for group in (reference() for reference in _formed) if group in still_here]
    if all(group.group_name.isdecimal() for group in formed):
        for group in formed:
            dist.destroy_process_group(group)
    _formed.clear()


def find(names: tuple[str, ...], path: str | None):
    """Return the student's object with the first of these names that is defined.

    Args:
        names: The names.
        path: The student's file; None looks in this rank's namespace.

    Raises:
        PieceMissing: If none of the names is defined.
        AssertionError: If the object was imported from the solutions or from torch.
    """
    namespace = get_ipython().user_ns if path is None else vars(_load(path))
    piece = next((name for name in names if name in namespace), None)
    if piece is None:
        on_ranks = "on the ranks: run the %%ranks cell that defines it. If that fails, run the cells above it first"
        where = on_ranks if path is None else f"in {Path(path).name}"
        raise PieceMissing(f"{names[0]} is not defined {where}")
    found = namespace[piece]
    origin = _origin_of(found)
    package = origin.split(".")[0]
    if package == "torch" or (package == SOLUTIONS and not is_a_solution(path)):
        raise AssertionError(f"{piece} is imported from {origin}: write it by hand")
    return found


def device_here() -> torch.device:
    """Return the device of this rank."""
    return torch.device(rankside.here.device)


def mesh_here() -> DeviceMesh:
    """Create the mesh of all ranks, on the type of device of this rank."""
    return init_device_mesh(device_here().type, (dist.get_world_size(),))


def earlier_piece(module: str, name: str):
    """Return a piece of an earlier chapter as the course's own solution defines it, such as zero1's FlatParameters."""
    return getattr(importlib.import_module(f"{SOLUTIONS}.{module}"), name)


def is_a_solution(path: str | None) -> bool:
    """Return whether a file is one of our solutions, which may import a piece from another module of the same lab."""
    spec = importlib.util.find_spec(SOLUTIONS)
    folders = (spec and spec.submodule_search_locations) or []
    return path is not None and Path(path).resolve().parent in [Path(folder).resolve() for folder in folders]


def load(path: str) -> tuple[dict[str, str], int]:
    """Load a student's file.

    Returns:
        The names that it defines, each with the module from which its value comes, and how many collectives are called
        meanwhile.
    """
    with instrumentation.listening() as calls:
        namespace = vars(_load(path))
    return {name: _origin_of(value) for name, value in namespace.items()}, len(calls)


def _origin_of(value) -> str:
    return str(getattr(value, "__module__", "") or "")


def _load(path: str):
    """Load a file as a fresh module, so that no state is carried over from one probe to the next."""
    spec = importlib.util.spec_from_file_location("candidate", path)
    assert spec is not None  # None stands for a file that is no Python
    module = importlib.util.module_from_spec(spec)
    sys.modules["candidate"] = module  # pickle and deepcopy look up classes here
    exec(_compiled(Path(path).read_bytes(), path), vars(module))
    return module


@functools.lru_cache(maxsize=4)
def _compiled(source: bytes, path: str) -> CodeType:
    """Compile a student's file. The result is kept, because a check loads the same file dozens of times."""
    return compile(source, path, "exec", dont_inherit=True)
