"""Squares the gradients in their own dtype, in which large squares overflow.

caught by: ZeRO1 · large gradients
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        self.reduce_gradients()
        gradients = [flat_parameter.shard.grad for flat_parameter in self.flat_parameters]
        if not gradients:
            return torch.zeros(())
        square = torch.stack([gradient.square().sum().double() for gradient in gradients]).sum()
        dist.all_reduce(square, group=self.group)
        for gradient in gradients:
            gradient *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1)
        return square.sqrt()
