"""Adds up no squares on a stage whose parameters are all frozen, so the sum is not a tensor there.

caught by: Parallel3D · awkward norms
"""

import torch
import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    @torch.no_grad()
    def clip_grad_norm_(self, max_norm):
        gradients = self.gradients()
        total = sum(gradient.double().square().sum() / self.copies_of(parameter) for parameter, gradient in gradients)
        dist.all_reduce(total)
        norm = total.sqrt()
        for _, gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
