"""Adds gradients of bf16 up in float32: better sums, and twice the bytes.

caught by: ShardedOptimizer · bf16
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class _Gradients(right.FlatGradients):
    def reduce(self):
        if self.home.shard.grad is None:
            for parameter, piece in zip(self.home.parameters, self.slices, strict=True):
                piece.copy_(0 * piece if parameter.grad is None else parameter.grad)
                parameter.grad = piece
            wide = self.flat.to(torch.promote_types(self.flat.dtype, torch.float32))
            mean = right.reduce_scatter_(wide, self.home.group) / dist.get_world_size(self.home.group)
            self.home.shard.grad = mean.to(self.flat.dtype)


class ZeRO1(right.ZeRO1):
    def _lay_out(self, parameters):
        added = super()._lay_out(parameters)
        for each in added:
            each.__class__ = _Gradients
        return added
