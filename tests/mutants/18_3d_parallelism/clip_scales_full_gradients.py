"""Scales each .grad, although ZeRO1 updates its shard with the averaged one.

caught by: Parallel3D · ZeRO-1's norm
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
        for parameter in (p for p in self.stage.parameters() if p.grad is not None):
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm
