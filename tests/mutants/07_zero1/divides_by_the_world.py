"""Divides by the world size instead of the size of the group.

caught by: ZeRO1 · group
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        super().reduce_gradients()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad *= dist.get_world_size(self.group) / dist.get_world_size()
