"""Lets torch choose the dtype: float32 keeps only about seven digits.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right  # noqa: F401


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()
