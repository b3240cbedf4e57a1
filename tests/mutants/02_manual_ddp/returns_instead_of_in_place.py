"""Returns the mean and leaves the tensor unchanged.

caught by: mean_over_ranks_ · values
"""

import torch.distributed as dist

from solutions.manual_ddp import ManualDDP  # noqa: F401


def mean_over_ranks_(tensor, group=None):
    mean = tensor.clone()
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)
