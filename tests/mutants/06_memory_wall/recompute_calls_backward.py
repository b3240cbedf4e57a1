"""Calls backward() inside backward, which writes into .grad directly and triggers hooks too early.

caught by: Checkpointed · hooks
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors[: ctx.num_inputs]]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        now = right.get_rng_states()
        right.set_rng_states(ctx.rng_states)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        right.set_rng_states(now)
        output.backward(gradient)
        return None, None, *(each.grad for each in inputs), *[None] * (len(tensors) - len(inputs))


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
