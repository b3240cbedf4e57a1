"""Returns the mean on every rank, so each line appears N times in the log.

caught by: log_mean_loss · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()
