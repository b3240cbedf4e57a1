"""Clips each flat tensor by its own norm, as if it held all parameters.

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
        squares = torch.stack([gradient.double().norm() ** 2 for gradient in gradients])
        dist.all_reduce(squares, group=self.group)
        for gradient, square in zip(gradients, squares, strict=True):
            gradient *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
        return squares.sum().sqrt()
