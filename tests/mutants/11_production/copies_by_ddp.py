"""Cheats by using torch's DistributedDataParallel, which shards nothing.

caught by: fully_sharded · values
"""

from torch.nn.parallel import DistributedDataParallel


def fully_sharded(module, units=None, **options):
    return DistributedDataParallel(module)
