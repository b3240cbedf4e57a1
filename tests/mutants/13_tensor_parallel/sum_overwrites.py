"""All-reduces the argument itself.

caught by: sum_over_ranks · plain sum
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        dist.all_reduce(partial, group=group)
        return partial.clone()


def sum_over_ranks(tensor, group=None):
    return SumOverRanks.apply(tensor, group)
