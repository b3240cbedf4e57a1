"""One message per parameter to add up, then each rank takes its part.

caught by: FlatGradients · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.home.shard.grad is None:
            size = dist.get_world_size(self.home.group)
            for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
                piece.copy_(0 * piece if parameter.grad is None else parameter.grad)
                parameter.grad = piece
                dist.all_reduce(piece, group=self.home.group)
            self.home.shard.grad = self.home.own(self.flat).div_(size)
