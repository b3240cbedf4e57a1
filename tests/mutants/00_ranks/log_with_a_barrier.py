"""Adds a barrier as a cure for hangs: every step pays for it.

caught by: log_mean_loss · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach() / dist.get_world_size()
    dist.barrier()
    dist.all_reduce(mean)
    return mean.item() if dist.get_rank() == 0 else None
