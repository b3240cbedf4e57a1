"""Adds up the norms instead of their squares.

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
        norm = sum(gradient.double().norm() for gradient in gradients)
        dist.all_reduce(norm, group=self.group)
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
