"""Collects all mean gradients on every rank to see their norm.

caught by: ClipsGradients · wire
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        grads = [each.home.shard.grad for each in self.gradients]
        whole = [right.collect(grad, self.group, None).double() for grad in grads]
        norm = sum(each.norm() ** 2 for each in whole).sqrt()
        for grad in grads:
            grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
