"""Receives before sending on every rank: each rank waits for its left neighbor, a deadlock.

caught by: pass_right · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, sum_over_ranks  # noqa: F401


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    dist.recv(received, src=(rank - 1) % size)
    dist.send(tensor, dst=(rank + 1) % size)
    return received
