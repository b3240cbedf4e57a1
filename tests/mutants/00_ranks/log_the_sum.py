"""Returns the sum, without dividing by the number of ranks.

caught by: log_mean_loss · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() if dist.get_rank() == 0 else None
