"""Divides by the world size instead of the size of the group.

caught by: mean_over_ranks_ · group
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def mean_over_ranks_(tensor, group=None):
    dist.all_reduce(tensor, group=group)
    tensor /= dist.get_world_size()
