"""Keeps the graph recomputed in backward until the next backward.

caught by: Checkpointed · memory
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        gradients = right.Recompute.backward(ctx, gradient)
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors[: ctx.num_inputs]]
        with torch.enable_grad():
            ctx.module.last = ctx.module(*inputs)
        return gradients


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
