"""All-gathers all gradients to compute their norm.

caught by: ZeRO3 · clip
"""

import torch

from solutions import zero3 as right
from solutions.collectives import gather_shards


class ZeRO3(right.ZeRO3):
    def clip_grad_norm_(self, max_norm):
        full = [gather_shards(each.grad, self.group) for each in self.shards if each.grad is not None]
        norm = torch.stack([each.double().norm() for each in full]).norm()
        for each in self.shards:
            if each.grad is not None:
                each.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
