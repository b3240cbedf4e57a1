"""Divides gradients by two, whatever the number of ranks.

caught by: PlainZeRO3 · world sizes
"""

import torch.distributed as dist

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for shard in self.shards:
            shard.grad *= dist.get_world_size() / 2
