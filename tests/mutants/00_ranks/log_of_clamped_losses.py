"""Is wrong for losses above 4.

caught by: log_mean_loss · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import broadcast_by_hand, global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach().clone().clamp(max=4)
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size() if dist.get_rank() == 0 else None
