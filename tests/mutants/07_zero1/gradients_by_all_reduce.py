"""All-reduces the gradients and uses one shard of the result: twice the bytes.

caught by: FlatGradients · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.flat_parameter.shard.grad is not None:
            return
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        dist.all_reduce(self.flat, group=self.layout.group)
        mean = self.layout.shard_of(self.flat).div_(dist.get_world_size(self.layout.group))
        self.flat_parameter.shard.grad = mean
