"""Do all ranks launch the same collective? Asked before each one runs, where a lab wants to know at once.

gloo itself notices nothing: another operator, dtype or root hangs or adds up nonsense, and another size
aborts the process. So each rank makes a number of what it is about to launch, and an all_reduce MAX of
(number, −number) on a group of its own tells whether the largest and the smallest are the same.

It costs one small message per collective. torch's own `DebugLevel.DETAIL` asks the same question at about
twice the price, and with it DistributedDataParallel crashes on gloo (torch 2.13, measured).
"""

import zlib

import torch
import torch.distributed as dist

from shared.wire import completion, instrumentation

SIGN = "Ranks do not agree on the next collective"
_MAY_DIFFER = ("gather", "scatter", "all_to_all", "all_to_all_single")  # in shape, from rank to rank


class Disagreement(RuntimeError):
    """Ranks were about to launch different collectives; none of them was launched."""


def watch() -> None:
    """Compare every collective on the default group from now on. All ranks must call this together."""
    control = dist.new_group(backend="gloo")
    world = dist.group.WORLD.group_name
    backend = control._get_backend(torch.device("cpu"))  # below the dispatcher, so the hooks do not see it

    def compare(call: instrumentation.Call) -> None:
        if call.group_name != world or call.op in instrumentation.POINT_TO_POINT:
            return
        number = _number_of(call)
        pair = torch.tensor([number, -number])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        completion.untimed_wait(backend.allreduce([pair], options))  # our wait is not the student's
        if pair[0] != -pair[1]:
            raise Disagreement(f"{SIGN}; this one is at {call}")

    instrumentation.before_launch[:] = [compare]


def ignore() -> None:
    """Compare no more."""
    instrumentation.before_launch.clear()


def _number_of(call: instrumentation.Call) -> int:
    return zlib.crc32(must_agree(call).encode())


def must_agree(call: instrumentation.Call) -> str:
    """Say of a collective what must be the same on all ranks."""
    shape = () if call.op in _MAY_DIFFER else call.shape
    return f"{call.op} {shape} {call.dtype} {call.root}"
