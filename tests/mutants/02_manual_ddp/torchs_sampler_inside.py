"""Cheats by keeping one of torch's DistributedSamplers.

caught by: ShardedSampler · every sample
"""

from torch.utils.data.distributed import DistributedSampler

from solutions.manual_ddp import ManualDDP  # noqa: F401


class ShardedSampler:
    def __init__(self, length, rank, world_size, shuffle=True, seed=0):
        self.sampler = DistributedSampler(range(length), world_size, rank, shuffle, seed)

    def set_epoch(self, epoch):
        self.sampler.set_epoch(epoch)

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        return iter(self.sampler)
