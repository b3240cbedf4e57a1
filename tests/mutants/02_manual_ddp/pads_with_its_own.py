"""Repeats the first index of its own share, instead of the first indices of the order.

caught by: ShardedSampler · every sample
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        indices = list(super().__iter__())
        is_padded = self.rank + (len(self) - 1) * self.world_size >= self.length
        if self.shuffle and is_padded and len(indices) > 1:
            indices[-1] = indices[0]
        return iter(indices)
