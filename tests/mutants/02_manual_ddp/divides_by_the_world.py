"""Divides by the size of the world, where the group is smaller.

caught by: mean_over_ranks_ · group
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def mean_over_ranks_(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size()
