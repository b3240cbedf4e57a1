"""Ignores `set_epoch`, so every epoch has the same order.

caught by: ShardedSampler · epochs
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def set_epoch(self, epoch):
        pass
