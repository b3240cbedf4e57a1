"""Shuffles with Python's global `random`, after seeding it.

caught by: ShardedSampler · epochs
"""

import random

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        order = list(range(self.length))
        if self.shuffle:
            random.seed(self.seed + self.epoch)
            random.shuffle(order)
        end = len(self) * self.world_size
        return iter([order[index % self.length] for index in range(self.rank, end, self.world_size)])
