"""Uses one all-reduce per flat tensor, where a single element in total would do.

caught by: ZeRO1 · clipping wire
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [each.shard.grad for each in self.flat_parameters]
        squares = [gradient.double().norm() ** 2 for gradient in gradients]
        for square in squares:
            dist.all_reduce(square, group=self.group)
        norm = sum(squares).sqrt()
        for gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
