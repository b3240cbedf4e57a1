"""A student cures a hang with a barrier, which every step then pays for.

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
