"""Forgets to divide by the number of ranks, which the plain loop shows first.

caught by: FlatGradients · plain
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        super().reduce()
        self.flat_parameter.shard.grad *= dist.get_world_size(self.layout.group)
