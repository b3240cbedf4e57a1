"""All-reduces the caller's loss in place, because `detach()` shares its memory.

caught by: log_mean_loss · argument
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, pass_right, sum_over_ranks  # noqa: F401


def log_mean_loss(loss: torch.Tensor) -> float | None:
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() if dist.get_rank() == 0 else None
