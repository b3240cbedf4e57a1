"""Averages the gradients.

caught by: copy_to_ranks · plain gradient
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class CopyToRanks(right.CopyToRanks):
    @staticmethod
    def backward(ctx, gradient):
        total, _ = right.CopyToRanks.backward(ctx, gradient)
        return total / dist.get_world_size(ctx.group), None


def copy_to_ranks(tensor, group=None):
    return CopyToRanks.apply(tensor, group)
