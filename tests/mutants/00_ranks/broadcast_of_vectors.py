"""Leaves tensors with several dimensions unchanged.

caught by: broadcast_by_hand · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    if tensor.dim() > 1:
        return
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for dst in range(dist.get_world_size()):
        if dst != src:
            dist.send(tensor, dst=dst)
