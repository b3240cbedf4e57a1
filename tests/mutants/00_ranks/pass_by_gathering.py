"""All-gathers every rank's tensor and keeps one of them: N times the bytes.

caught by: pass_right · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, sum_over_ranks  # noqa: F401


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors[dist.get_rank() - 1]
