"""A student asks for the rank before the collective: the published pattern that hangs.

caught by: log_mean_loss · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    if dist.get_rank() != 0:
        return None
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()
