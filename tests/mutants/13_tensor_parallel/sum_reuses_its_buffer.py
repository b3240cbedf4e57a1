"""Adds up in one buffer in every call, which overwrites sums that are still in use.

caught by: sum_over_ranks · several calls
"""

import torch
import torch.distributed as dist

from solutions import tensor_operators as right

BUFFERS = {}


class SumOverRanks(right.SumOverRanks):
    @staticmethod
    def forward(ctx, partial, group):
        total = BUFFERS.setdefault(partial.shape, torch.empty_like(partial)).copy_(partial)
        dist.all_reduce(total, group=group)
        return total.detach()


def sum_over_ranks(partial, group=None):
    return SumOverRanks.apply(partial, group)
