"""Returns the sum over the ranks instead of the mean.

caught by: FlatGradients · values
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        was_reduced = self.flat_parameter.shard.grad is not None
        super().reduce()
        if not was_reduced:
            self.flat_parameter.shard.grad *= dist.get_world_size(self.layout.group)
