"""Receives into a new tensor and leaves the caller's tensor unchanged.

caught by: broadcast_by_hand · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> torch.Tensor:
    if dist.get_rank() != src:
        received = torch.empty_like(tensor)
        dist.recv(received, src=src)
        return received
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, dst=other)
    return tensor
