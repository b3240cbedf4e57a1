"""Shuffles with a different seed on each rank: some samples appear twice and some never.

caught by: ShardedSampler · every sample
"""

import torch

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __iter__(self):
        order = torch.arange(self.length)
        if self.shuffle:
            draw = torch.Generator().manual_seed(self.seed + self.epoch + 1000 * self.rank)
            order = torch.randperm(self.length, generator=draw)
        indices = torch.arange(self.rank, len(self) * self.world_size, self.world_size)
        return iter(order[indices % self.length].tolist())
