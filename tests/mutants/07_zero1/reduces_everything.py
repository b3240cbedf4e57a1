"""All-reduces the gradients and updates its own shard: the state is sharded, but 3(N−1)/N of the parameters' bytes are
sent instead of 2(N−1)/N.

caught by: ZeRO1 · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        for gradients in self.gradients:
            layout = gradients.layout
            for parameter, view in zip(layout.parameters, gradients.views, strict=True):
                view.copy_(0 * view if parameter.grad is None else parameter.grad)
                parameter.grad = view
            dist.all_reduce(gradients.flat, group=self.group)
            mean = layout.shard_of(gradients.flat).div_(dist.get_world_size(self.group))
            gradients.flat_parameter.shard.grad = mean
