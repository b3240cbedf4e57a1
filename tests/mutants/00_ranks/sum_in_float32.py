"""A student lets torch choose the dtype, and loses all digits after the seventh.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right  # noqa: F401


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()
