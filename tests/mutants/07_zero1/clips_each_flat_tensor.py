"""Bounds the norm of each flat tensor, as if each were all parameters.

caught by: ClipsGradients · values
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        squares = torch.stack([each.home.shard.grad.double().norm() ** 2 for each in self.gradients])
        dist.all_reduce(squares, group=self.group)
        for each, square in zip(self.gradients, squares, strict=True):
            each.home.shard.grad *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
        return squares.sum().sqrt()
