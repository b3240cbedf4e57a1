"""Always broadcasts from rank 0 and ignores `src`.

caught by: broadcast_by_hand · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    if dist.get_rank() != 0:
        dist.recv(tensor, src=0)
        return
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, dst=other)
