"""Begins the next epoch after each iteration, although `set_epoch` was not called.

caught by: ShardedSampler · epochs
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        yield from super().__iter__()
        self.epoch += 1
