"""Makes every receiver send the tensor back as an acknowledgment, which doubles the number of messages.

caught by: broadcast_by_hand · wire
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, pass_right, sum_over_ranks  # noqa: F401


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        dist.send(tensor, dst=src)
        return
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, dst=other)
            dist.recv(torch.empty_like(tensor), src=other)
