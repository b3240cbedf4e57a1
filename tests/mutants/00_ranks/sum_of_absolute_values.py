"""Is wrong for negative numbers.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import broadcast_by_hand, global_mean, log_mean_loss, pass_right  # noqa: F401


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(abs(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
