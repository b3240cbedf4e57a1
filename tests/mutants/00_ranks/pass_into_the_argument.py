"""Receives into the argument to save a buffer, and so overwrites the caller's tensor.

caught by: pass_right · argument
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, sum_over_ranks  # noqa: F401


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor
    sending = dist.isend(tensor.clone(), dst=(rank + 1) % size)
    dist.recv(tensor, src=(rank - 1) % size)
    sending.wait()
    return tensor
