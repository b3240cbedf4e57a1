"""Calls the collective on rank 0 only, a pattern found in published code: rank 0 hangs.

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
