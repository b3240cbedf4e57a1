"""Fails if the module does not use one of its parameters.

caught by: Checkpointed · values
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
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(output, wanted, gradient))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
