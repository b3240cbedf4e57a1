"""Mismatch detection: before each collective, check that all ranks launch the same one.

gloo does not detect a mismatch. If the ranks differ in the operator, dtype or root, it hangs or produces wrong values,
and if they differ in the size, it aborts the process. So each rank computes a hash of the collective it is about to
launch, and an all_reduce MAX of (hash, −hash) on a separate group shows whether the largest and the smallest are equal.

This costs one small all-reduce per collective. torch's own `DebugLevel.DETAIL` does the same check at about twice the
cost, and DistributedDataParallel crashes with it on gloo (measured with torch 2.13).
"""

import contextlib
import zlib

import torch
import torch.distributed as dist

from shared.wire import completion, instrumentation

MESSAGE = "Ranks do not agree on the next collective"
_MAY_DIFFER = ("gather", "scatter", "all_to_all", "all_to_all_single")  # their shapes may differ between ranks


class Disagreement(RuntimeError):
    """The ranks were about to launch different collectives. None of them was launched."""


def watch() -> None:
    """Compare every collective on the default group from now on. All ranks must call this together."""
    control = dist.new_group(backend="gloo")
    assert isinstance(control, dist.ProcessGroup)  # All ranks are in it.
    world = dist.distributed_c10d._get_default_group().group_name
    backend = control._get_backend(torch.device("cpu"))  # below the dispatcher, where the hooks do not see it

    def compare(call: instrumentation.Call) -> None:
        if call.group_name != world or call.op in instrumentation.POINT_TO_POINT:
            return
        value = _hash_of(call)
        pair = torch.tensor([value, -value])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX  # pyright: ignore[reportAttributeAccessIssue] (torch's stub is wrong)
        work = backend.allreduce([pair], options)  # pyright: ignore[reportAttributeAccessIssue] (not in torch's stub)
        completion.untimed_wait(work)  # this wait is not part of the student's program
        if pair[0] != -pair[1]:
            raise Disagreement(f"{MESSAGE}; this rank called {call}")

    instrumentation.before_launch[:] = [compare]


def ignore() -> None:
    """Stop comparing collectives."""
    instrumentation.before_launch.clear()


@contextlib.contextmanager
def paused():
    """Do not compare collectives inside the block. All ranks must enter and leave it together."""
    checks = list(instrumentation.before_launch)
    ignore()
    try:
        yield
    finally:
        instrumentation.before_launch[:] = checks


def _hash_of(call: instrumentation.Call) -> int:
    return zlib.crc32(must_agree(call).encode())


def must_agree(call: instrumentation.Call) -> str:
    """Return the properties of a collective that must be the same on all ranks, as one string."""
    shape = () if call.op in _MAY_DIFFER else call.shape
    return f"{call.op} {shape} {call.dtype} {call.root}"
