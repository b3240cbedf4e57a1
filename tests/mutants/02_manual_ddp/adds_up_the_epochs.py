"""Adds the epoch to the seed, which then depends on all earlier calls of `set_epoch`.

caught by: ShardedSampler · epochs
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def set_epoch(self, epoch):
        self.seed += epoch
