"""Adds up in float32.

caught by: parallelize · clipping
"""

import torch
import torch.distributed as dist

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        sharded = right.sharded_names(self)
        gradients = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        squares = {name: gradient.double().square().sum() for name, gradient in gradients.items()}
        total = sum(square for name, square in squares.items() if name in sharded).float()
        dist.all_reduce(total, group=self.group)
        norm = (total + sum(square for name, square in squares.items() if name not in sharded)).sqrt()
        for gradient in gradients.values():
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
