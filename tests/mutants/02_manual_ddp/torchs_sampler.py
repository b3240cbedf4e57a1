"""Cheats by deriving from torch's DistributedSampler.

caught by: ShardedSampler · every sample
"""

from torch.utils.data.distributed import DistributedSampler

from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler(DistributedSampler):
    def __init__(self, length, rank, world_size, shuffle=True, seed=0):
        super().__init__(range(length), world_size, rank, shuffle, seed)
