"""Gives ranks different numbers of samples when the length is not a multiple of the number of ranks.

caught by: ShardedSampler · every sample
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        whole = right.ShardedSampler(self.length, 0, 1, self.shuffle, self.seed)
        whole.set_epoch(self.epoch)
        return iter(list(whole)[self.rank :: self.world_size])
