"""Gives frozen parameters gradients of zeros, which AdamW takes for a reason to decay them.

caught by: Parallel3D · awkward models
"""

import torch

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        if self.zero_stage == 0:
            for parameter in self.stage.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return loss
