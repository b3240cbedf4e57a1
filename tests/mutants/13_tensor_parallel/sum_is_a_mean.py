"""Divides the sum by the number of ranks, as data parallelism does.

caught by: sum_over_ranks · plain sum
"""

import torch.distributed as dist

from solutions import tensor_operators as right


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        return right.SumOverRanks.forward(ctx, partial, group) / dist.get_world_size(group)


def sum_over_ranks(tensor, group=None):
    return SumOverRanks.apply(tensor, group)
