"""Simulate worlds that are larger than this machine's: one process plays every rank in turn, and nothing is sent.

torch's `fake` process group completes every call immediately. So the values mean nothing, and only the recorded
messages are checked.
"""

import contextlib
from unittest import mock

import torch
import torch.distributed as dist

from shared.wire import instrumentation

WORLD_SIZES = (5, 7, 8)


def probe_far(piece, arguments: int, elements: int) -> dict[int, list[list[instrumentation.Call]]]:
    """Call the function as each rank of each world. Run this on a rank that is in no process group.

    Args:
        piece: The student's function.
        arguments: The number of tensors to call it with.
        elements: The number of elements of each tensor.

    Returns:
        What each rank launched, by world size.
    """
    return {size: [_part_of(rank, size, piece, arguments, elements) for rank in range(size)] for size in WORLD_SIZES}


def _part_of(rank: int, size: int, piece, arguments: int, elements: int) -> list[instrumentation.Call]:
    with _fake_group(rank, size), instrumentation.listening() as calls:
        piece(*(torch.ones(elements) for _ in range(arguments)))
    return calls


@contextlib.contextmanager
def _fake_group(rank: int, size: int):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    refusals = instrumentation.before_launch[:]
    instrumentation.before_launch.clear()  # these hooks belong to the group that this rank has left
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    completed = mock.patch.object(dist.Work, "is_completed", lambda work: True)  # it is False after a fake wait()
    try:
        with completed:
            yield
    finally:
        dist.destroy_process_group()
        instrumentation.before_launch[:] = refusals
        instrumentation.reset()
