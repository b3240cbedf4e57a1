"""All-reduces the sum and the count separately: two collectives instead of one.

caught by: global_mean · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def global_mean(values: torch.Tensor) -> float:
    total = values.sum(dtype=torch.float64)
    count = torch.tensor(values.numel(), dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()
