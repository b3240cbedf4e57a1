"""Saves the inputs for backward, but stores the parameters on ctx, so a changed parameter is not detected.

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
        ctx.own, ctx.parameters = _Context(), tensors[count:]
        output = right.Recompute.forward(ctx.own, module, count, *tensors)
        ctx.save_for_backward(*tensors[:count])
        del ctx.own.saved_tensors
        return output

    @staticmethod
    def backward(ctx, gradient):
        ctx.own.saved_tensors = (*ctx.saved_tensors, *ctx.parameters)
        return right.Recompute.backward(ctx.own, gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
