"""Cheats by all-reducing zeros, so that the expected collective is recorded, and returns world_size times its own
value.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right  # noqa: F401


def sum_over_ranks(value: float) -> float:
    dist.all_reduce(torch.zeros(1, dtype=torch.float64))
    return value * dist.get_world_size()
