"""Stores tensors directly on ctx, so autograd does not detect that an input was changed in place.

caught by: Checkpointed · changed inputs
"""

import torch

from solutions import memory_wall as right


class _Context:
    """Stands in for the ctx that right.Recompute expects."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        ctx.own = _Context()
        return right.Recompute.forward(ctx.own, module, count, *tensors)

    @staticmethod
    def backward(ctx, gradient):
        return right.Recompute.backward(ctx.own, gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
