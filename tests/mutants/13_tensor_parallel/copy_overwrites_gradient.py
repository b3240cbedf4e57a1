"""All-reduces the gradient in place, which other computations may still need.

caught by: copy_to_ranks · plain gradient
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class CopyToRanks(right.CopyToRanks):
    @staticmethod
    def backward(ctx, gradient):
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def copy_to_ranks(tensor, group=None):
    return CopyToRanks.apply(tensor, group)
