"""Launches the send and the receive but waits only for the send: the result may not have been received yet.

caught by: pass_right · waits
"""

import torch
import torch.distributed as dist

from solutions.first_collectives import global_mean, log_mean_loss, sum_over_ranks  # noqa: F401

_in_flight = []


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % size)
    _in_flight.append(dist.irecv(received, src=(rank - 1) % size))
    sending.wait()
    return received
