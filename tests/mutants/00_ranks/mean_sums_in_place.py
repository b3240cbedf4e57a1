"""Accumulates in place on the result of `.double()`, which is the caller's own tensor if it is already float64.

caught by: global_mean · argument
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def global_mean(values: torch.Tensor) -> float:
    running = values.double().cumsum_(0)
    total = running[-1] if len(running) else 0.0
    sum_and_count = torch.tensor([total, len(values)], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()
