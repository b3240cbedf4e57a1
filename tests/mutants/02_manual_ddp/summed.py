"""Sums over the ranks without dividing.

caught by: mean_over_ranks_ · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def mean_over_ranks_(tensor, group=None):
    dist.all_reduce(tensor, group=group)
