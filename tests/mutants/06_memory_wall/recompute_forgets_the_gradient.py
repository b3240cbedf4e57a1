"""Differentiates the sum of the output and ignores the incoming gradient.

caught by: Checkpointed · values
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        return right.Recompute.backward(ctx, torch.ones_like(gradient))


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
