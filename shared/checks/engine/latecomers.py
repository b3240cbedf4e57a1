"""A rank that comes late on purpose: it stands by until the others have done without it what they can."""

import contextlib
import time

import torch.distributed as dist

from shared.deadlines import scaled
from shared.ranks import rankside
from shared.wire import instrumentation

PATIENCE_S = scaled(4.0)  # what a rank that would not wait for us needs a few milliseconds for
LATE_S = scaled(0.05)  # and then: who takes what has not arrived has taken it by now


class Meeting:
    """Ranks tell, in a store of their own, how far they are. name: used once only"""

    def __init__(self, name: str):
        self.store = dist.PrefixStore(name, rankside.here.store)

    def come(self) -> None:
        self.store.set(f"{dist.get_rank()}", "come")

    def missing(self) -> list[int]:
        """Stand by until all others have come. → who had not when patience ended"""
        missing = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        began_s = time.monotonic()
        while missing and time.monotonic() - began_s < PATIENCE_S:
            missing = [rank for rank in missing if not self.store.check([f"{rank}"])]
            time.sleep(1e-3)
        time.sleep(LATE_S)
        return missing


@contextlib.contextmanager
def launches_unasked():
    """A notebook's ranks ask one another before each launch whether they agree: so every launch waits for all ranks."""
    questions = instrumentation.before_launch[:]
    instrumentation.before_launch.clear()
    try:
        yield
    finally:
        instrumentation.before_launch[:] = questions
