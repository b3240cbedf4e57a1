"""Is wrong for negative elements.

caught by: pass_right · values
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import broadcast_by_hand, global_mean, log_mean_loss, sum_over_ranks  # noqa: F401


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor.abs(), (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    return received
