"""All-gathers the mean gradients on every rank to compute their norm.

caught by: ZeRO1 · clipping wire
"""

import torch

from solutions import zero1 as right
from solutions.collectives import gather_shards


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [each.shard.grad for each in self.flat_parameters]
        full = [gather_shards(gradient, self.group).double() for gradient in gradients]
        norm = sum(each.norm() ** 2 for each in full).sqrt()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
