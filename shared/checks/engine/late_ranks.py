"""Make one rank late on purpose: it waits until the other ranks have done everything they can do without it.

On a GPU, a kernel is loaded when it is launched for the first time, and that may wait until the GPU is idle. If the GPU
is waiting for the late rank, the host then waits, too, and correct code seems to block. So each probe is rehearsed
first: it runs once with no rank late, which loads all of its kernels.
"""

import contextlib
import time

import torch
import torch.distributed as dist

from shared.deadlines import scaled
from shared.ranks import rankside
from shared.wire import instrumentation

PATIENCE_S = scaled(4.0)  # a rank that does not depend on the late one needs a few milliseconds
LATE_S = scaled(0.05)  # a further wait: a rank that reads data before it has arrived has done so by then

_rehearsing = False


def rehearsed(probe):
    """Let a probe run twice on a GPU, the first time with no rank late. The result of the first run is discarded."""

    def run(*args):
        global _rehearsing
        if torch.cuda.is_initialized():
            _rehearsing = True
            try:
                probe(*args)
                instrumentation.synchronize()
            finally:
                _rehearsing = False
        return probe(*args)

    return run


class Rendezvous:
    """A meeting point in the store, where ranks report that they have arrived.

    Args:
        name: A name that is used only once.
    """

    def __init__(self, name: str):
        self.store = dist.PrefixStore(name, rankside.here.store)

    def arrive(self, with_the_stream: bool = True) -> None:
        """Report that this rank has arrived.

        Args:
            with_the_stream: Wait first until the current stream has arrived, too. Over NCCL, the host would arrive
                even if the stream waits for the late rank. False if the last launch may be a synchronous one.
        """
        if _rehearsing:
            return
        if with_the_stream:
            instrumentation.synchronize()
        self.store.set(f"{dist.get_rank()}", "arrived")

    def missing(self) -> list[int]:
        """Wait until all other ranks have arrived, and return those that had not arrived after PATIENCE_S."""
        if _rehearsing:
            return []
        missing = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        began_s = time.monotonic()
        while missing and time.monotonic() - began_s < PATIENCE_S:
            missing = [rank for rank in missing if not self.store.check([f"{rank}"])]
            time.sleep(1e-3)
        time.sleep(LATE_S)
        return missing

    def has_arrived(self, rank: int, within_s: float) -> bool:
        """Wait for a rank that should not arrive. Returns whether it has arrived within that time."""
        ends_s = time.monotonic() + (0 if _rehearsing else within_s)
        while time.monotonic() < ends_s:
            if self.store.check([f"{rank}"]):
                return True
            time.sleep(1e-3)
        return False


@contextlib.contextmanager
def launches_unasked():
    """Disable mismatch detection, which makes every launch wait until all ranks have reached it."""
    questions = instrumentation.before_launch[:]
    instrumentation.before_launch.clear()
    try:
        yield
    finally:
        instrumentation.before_launch[:] = questions
