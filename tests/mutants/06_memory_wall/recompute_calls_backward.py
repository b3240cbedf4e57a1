"""Calls backward() inside backward, which writes into .grad directly and triggers hooks too early.

caught by: Checkpointed · hooks
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors[: ctx.count]]
        tensors = [*inputs, *ctx.saved_tensors[ctx.count :]]
        now = right.randomness()
        right.replay(ctx.random)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        right.replay(now)
        output.backward(gradient)
        return None, None, *(each.grad for each in inputs), *[None] * (len(tensors) - len(inputs))


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
