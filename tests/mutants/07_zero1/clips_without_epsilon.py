"""Divides by the norm, without the 1e-6 that torch adds to it.

caught by: ZeRO1 · clipping
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [each.shard.grad for each in self.flat_parameters]
        square = sum(gradient.double().square().sum() for gradient in gradients)
        dist.all_reduce(square, group=self.group)
        for gradient in gradients:
            gradient *= (max_norm / square.sqrt()).clamp(max=1)
        return square.sqrt()
