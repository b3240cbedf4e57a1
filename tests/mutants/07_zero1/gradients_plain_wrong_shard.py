"""Takes the mean of the first shard on every rank.

caught by: FlatGradients · plain
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        dist.all_reduce(self.flat, group=self.layout.group)
        size = dist.get_world_size(self.layout.group)
        self.flat_parameter.shard.grad = self.flat.view(size, -1)[0] / size
