"""Piles up what forwards leave, and takes the last forward for the first backward.

caught by: Checkpointed · order
"""

import torch

from solutions import memory_wall as right

PILE = []


class _Context:
    """What right.Recompute takes for its ctx."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, count, *tensors):
        PILE.append(_Context())
        return right.Recompute.forward(PILE[-1], module, count, *tensors)

    @staticmethod
    def backward(ctx, gradient):
        return right.Recompute.backward(PILE.pop(), gradient)


class Checkpointed(right.Checkpointed):
    def forward(self, *inputs):
        return _Recompute.apply(self.module, len(inputs), *inputs, *self.module.parameters())
