"""Computes the norm as if all ranks belonged to its group.

caught by: ZeRO1 · clipping group
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [each.shard.grad for each in self.flat_parameters]
        square = sum(gradient.double().norm() ** 2 for gradient in gradients)
        square *= dist.get_world_size() / dist.get_world_size(self.group)
        dist.all_reduce(square, group=self.group)
        for gradient in gradients:
            gradient *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
        return square.sqrt()
