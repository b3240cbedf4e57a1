"""Sends the square of each gradient by itself.

caught by: Parallel3D · one element
"""

import torch
import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        gradients = self.gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        for parameter, gradient in gradients:
            total += gradient.double().square().sum() / self.copies_of(parameter)
        squares = torch.zeros(64, dtype=torch.float64, device=total.device)
        squares[0] = total
        dist.all_reduce(squares)
        total = squares.sum()
        norm = total.sqrt()
        for _, gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
