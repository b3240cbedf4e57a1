"""Counts a tied weight once for each of its two layers.

caught by: parallelize · plain norm
"""

import torch
import torch.distributed as dist

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        sharded = right.sharded_names(self)
        named = self.named_parameters(remove_duplicate=False)
        squares = {name: p.grad.double().square().sum() for name, p in named if p.grad is not None}
        total = sum(square for name, square in squares.items() if name in sharded)
        dist.all_reduce(total, group=self.group)
        norm = (total + sum(square for name, square in squares.items() if name not in sharded)).sqrt()
        for parameter in self.parameters():
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
