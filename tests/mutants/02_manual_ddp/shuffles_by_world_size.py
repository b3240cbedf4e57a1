"""Draws another order for each number of ranks.

caught by: ShardedSampler · every sample
"""

from solutions import manual_ddp as right
from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(right.ShardedSampler):
    def __init__(self, length, rank, world_size, shuffle=True, seed=0):
        super().__init__(length, rank, world_size, shuffle, seed + world_size)
