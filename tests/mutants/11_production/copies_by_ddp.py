"""Cheats by using torch's DistributedDataParallel, which shards nothing.

caught by: fully_sharded · plain
"""

from torch.nn.parallel import DistributedDataParallel


def fully_sharded(module, units=None, **options):
    return DistributedDataParallel(module)
