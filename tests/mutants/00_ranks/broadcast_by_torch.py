"""Cheats by calling `dist.broadcast`.

caught by: broadcast_by_hand · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    dist.broadcast(tensor, src=src)
