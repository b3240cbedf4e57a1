"""Reuses one tensor for all calls and, on rank 0, adds to what the previous call left in it.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right  # noqa: F401

_total = torch.zeros(1, dtype=torch.float64)


def sum_over_ranks(value: float) -> float:
    if dist.get_rank() == 0:
        _total.add_(value)
    else:
        _total.fill_(value)
    dist.all_reduce(_total)
    return _total.item()
