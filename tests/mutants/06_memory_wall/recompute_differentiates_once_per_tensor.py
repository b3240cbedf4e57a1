"""Runs through the recomputed graph once for each gradient.

caught by: Checkpointed · twice
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

        def gradient_of(tensor):
            return torch.autograd.grad(output, tensor, gradient, retain_graph=True, allow_unused=True)[0]

        return None, None, *(gradient_of(tensor) if tensor.requires_grad else None for tensor in tensors)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
