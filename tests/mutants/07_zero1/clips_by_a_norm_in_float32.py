"""Adds up the squares of float64 gradients in float32.

caught by: ZeRO1 · clipping
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [each.shard.grad for each in self.flat_parameters]
        squared_norm = torch.zeros(1)
        for gradient in gradients:
            squared_norm += gradient.square().sum()
        dist.all_reduce(squared_norm, group=self.group)
        norm = squared_norm.sqrt()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
