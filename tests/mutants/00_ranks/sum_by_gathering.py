"""All-gathers the values and sums them locally: N times the bytes.

caught by: sum_over_ranks · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right  # noqa: F401


def sum_over_ranks(value: float) -> float:
    mine = torch.tensor([value], dtype=torch.float64)
    values = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(values, mine)
    return torch.cat(values).sum().item()
