"""Keeps its saved state on a stack, assuming that backward runs in the reverse order of forward.

caught by: Checkpointed · order
"""

import torch

from solutions import memory_wall as right

STACK = []


class _Context:
    """Stands in for the ctx that right.Recompute expects."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        STACK.append(_Context())
        return right.Recompute.forward(STACK[-1], module, count, *tensors)

    @staticmethod
    def backward(ctx, gradient):
        return right.Recompute.backward(STACK.pop(), gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
