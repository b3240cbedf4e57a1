"""Gathers all partial sums and adds them up, which sends more bytes than an all-reduce.

caught by: sum_over_ranks · wire
"""

import torch
import torch.distributed as dist

from solutions import tensor_operators as right


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        parts = [torch.empty_like(partial) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, partial.contiguous(), group=group)
        return sum(parts)


def sum_over_ranks(tensor, group=None):
    return SumOverRanks.apply(tensor, group)
