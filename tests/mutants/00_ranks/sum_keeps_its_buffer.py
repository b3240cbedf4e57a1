"""A student keeps one tensor for all calls, and adds to what the last call left in it.

caught by: sum_over_ranks · values
"""

import torch
import torch.distributed as dist

_total = torch.zeros(1, dtype=torch.float64)


def sum_over_ranks(value: float) -> float:
    if dist.get_rank() == 0:
        _total.add_(value)
    else:
        _total.fill_(value)
    dist.all_reduce(_total)
    return _total.item()


def global_mean(values: torch.Tensor) -> float:
    sum_and_count = torch.tensor([values.sum(), values.numel()], dtype=torch.float64)
    dist.all_reduce(sum_and_count)
    return (sum_and_count[0] / sum_and_count[1]).item()


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return tensor.clone()
    received = torch.empty_like(tensor)
    sending = dist.isend(tensor, dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    sending.wait()
    return received


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item() if dist.get_rank() == 0 else None
