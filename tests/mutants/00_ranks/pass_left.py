"""Sends to the left neighbor instead of the right one.

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
    sending = dist.isend(tensor, dst=(rank - 1) % size)
    dist.recv(received, src=(rank + 1) % size)
    sending.wait()
    return received
