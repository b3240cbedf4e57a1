"""Shuffles in the right order, but then gives each rank a contiguous block of it.

caught by: ShardedSampler · every sample
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        if not self.shuffle:
            return super().__iter__()
        whole = right.ShardedSampler(self.length, 0, 1, True, self.seed)
        whole.set_epoch(self.epoch)
        order, share = list(whole), len(self)
        return iter([order[index % self.length] for index in range(self.rank * share, (self.rank + 1) * share)])
