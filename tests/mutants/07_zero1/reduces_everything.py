"""Averages by all_reduce and steps its own part: the state is sharded, and 3(N−1)/N travel.

caught by: ShardedOptimizer · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def reduce_gradients(self):
        for each in self.gradients:
            for parameter, piece in zip(each.home.parameters, each.slices, strict=True):
                piece.copy_(0 * piece if parameter.grad is None else parameter.grad)
                parameter.grad = piece
            dist.all_reduce(each.flat, group=self.group)
            each.home.shard.grad = each.home.own(each.flat).div_(dist.get_world_size(self.group))
