"""All-reduces the gradient of each sample on its own.

caught by: copy_to_ranks · wire
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class CopyToRanks(right.CopyToRanks):
    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        for sample in total:
            dist.all_reduce(sample, group=ctx.group)
        return total, None


def copy_to_ranks(tensor, group=None):
    return CopyToRanks.apply(tensor, group)
