"""Keeps the group in the class instead of ctx, so that backward uses the group of the last call.

caught by: copy_to_ranks · several calls
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class CopyToRanks(right.CopyToRanks):
    @staticmethod
    def forward(ctx, x, group):
        CopyToRanks.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total, group=CopyToRanks.group)
        return total, None


def copy_to_ranks(x, group=None):
    return CopyToRanks.apply(x, group)
