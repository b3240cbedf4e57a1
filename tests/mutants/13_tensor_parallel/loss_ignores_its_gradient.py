"""Has a backward of its own, which takes the gradient of the loss to be 1, as it is not when gradients are accumulated.

caught by: vocab_parallel_cross_entropy · training
"""

import torch

from solutions import tensor_parallel as right


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_shard, targets, group):
        with torch.enable_grad():
            logits = logits_shard.detach().requires_grad_()
            loss = right.vocab_parallel_cross_entropy(logits, targets, group)
            (ctx.gradient,) = torch.autograd.grad(loss, logits)
        return loss.detach()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.gradient, None, None


def vocab_parallel_cross_entropy(logits_shard, targets, group=None):
    return Loss.apply(logits_shard, targets, group)
