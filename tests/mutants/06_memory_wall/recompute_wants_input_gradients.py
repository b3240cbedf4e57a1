"""Computes gradients of all inputs, even of those that require none.

caught by: Checkpointed · twice
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        saved_inputs = ctx.saved_tensors[: ctx.num_inputs]
        inputs = [saved.detach().requires_grad_(saved.is_floating_point()) for saved in saved_inputs]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        now = right.get_rng_states()
        right.set_rng_states(ctx.rng_states)
        with torch.enable_grad():
            output = ctx.module(*inputs)
        right.set_rng_states(now)
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
