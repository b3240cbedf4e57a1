"""All-reduces the gradients one by one and then takes the rank's shard.

caught by: FlatGradients · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is None:
            for parameter, view in zip(self.layout.parameters, self.views, strict=True):
                view.copy_(0 * view if parameter.grad is None else parameter.grad)
                parameter.grad = view
                dist.all_reduce(view, group=self.layout.group)
            mean = self.layout.shard_of(self.flat).div_(dist.get_world_size(self.layout.group))
            self.flat_parameter.shard.grad = mean
