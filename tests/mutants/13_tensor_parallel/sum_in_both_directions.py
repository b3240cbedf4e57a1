"""Adds up the gradients, too, although each rank already has the complete one.

caught by: sum_over_ranks · plain sum
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        ctx.group = group
        return right.SumOverRanks.forward(ctx, partial, group)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def sum_over_ranks(tensor, group=None):
    return SumOverRanks.apply(tensor, group)
