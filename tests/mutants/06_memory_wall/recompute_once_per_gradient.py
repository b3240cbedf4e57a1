"""Runs the module again for each gradient.

caught by: Checkpointed · twice
"""

import torch

from solutions import memory_wall as right


class _Recompute(right.Recompute):
    @staticmethod
    def backward(ctx, gradient):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors[: ctx.num_inputs]]
        tensors = [*inputs, *ctx.saved_tensors[ctx.num_inputs :]]
        found = []
        for tensor in tensors:
            now = right.get_rng_states()
            right.set_rng_states(ctx.rng_states)
            with torch.enable_grad():
                output = ctx.module(*inputs)
            right.set_rng_states(now)
            wanted = [tensor] if tensor.requires_grad else []
            found += torch.autograd.grad(output, wanted, gradient, allow_unused=True) if wanted else [None]
        return None, None, *found


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
