"""Averages everything on every rank, and uses one N-th of it.

caught by: FlatGradients · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatGradients(right.FlatGradients):
    def reduce(self):
        if self.home.shard.grad is not None:
            return
        for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
            if parameter.grad is None:
                piece.zero_()
            elif parameter.grad is not piece:
                piece.copy_(parameter.grad)
            parameter.grad = piece
        dist.all_reduce(self.flat, group=self.home.group)
        self.home.shard.grad = self.home.own(self.flat).div_(dist.get_world_size(self.home.group))
