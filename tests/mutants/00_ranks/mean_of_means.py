"""Averages the ranks' means, so values on a rank with few values weigh more.

caught by: global_mean · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def global_mean(values: torch.Tensor) -> float:
    mean = values.mean() if len(values) else torch.zeros((), dtype=torch.float64)
    mean_and_rank = torch.stack([mean, torch.ones_like(mean)])
    dist.all_reduce(mean_and_rank)
    return (mean_and_rank[0] / mean_and_rank[1]).item()
