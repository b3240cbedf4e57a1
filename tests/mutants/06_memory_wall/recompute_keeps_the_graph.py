"""Records the graph in forward and differentiates it in backward: no memory is saved, and nothing is recomputed.

caught by: Checkpointed · memory
"""

import torch

from solutions import memory_wall as right


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        ctx.inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors[:count]]
        ctx.tensors = [*ctx.inputs, *tensors[count:]]
        with torch.enable_grad():
            ctx.output = module(*ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        wanted = [tensor for tensor in ctx.tensors if tensor.requires_grad]
        found = iter(torch.autograd.grad(ctx.output, wanted, gradient, allow_unused=True))
        return None, None, *(next(found) if tensor.requires_grad else None for tensor in ctx.tensors)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
