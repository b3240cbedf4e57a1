"""Computes the sum as mean times count, which is NaN on a rank without values.

caught by: global_mean · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def global_mean(values: torch.Tensor) -> float:
    sum_and_count = torch.tensor([values.mean() * len(values), len(values)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()
