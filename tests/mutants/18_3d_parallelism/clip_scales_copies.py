"""Scales copies of the gradients.

caught by: Parallel3D · plain norm
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
        dist.all_reduce(total)
        norm = total.sqrt()
        for _, gradient in gradients:
            gradient = gradient * (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
