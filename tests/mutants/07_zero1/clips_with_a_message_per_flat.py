"""One all_reduce for each flat tensor, where one number would do.

caught by: ClipsGradients · wire
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        squares = [each.home.shard.grad.double().norm() ** 2 for each in self.gradients]
        for square in squares:
            dist.all_reduce(square, group=self.group)
        norm = sum(squares).sqrt()
        for each in self.gradients:
            each.home.shard.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
