"""A student averages the ranks' averages, so that a value on a small share weighs more.

caught by: global_mean · values
"""

import torch
import torch.distributed as dist


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def global_mean(values: torch.Tensor) -> float:
    mean = values.mean() if len(values) else torch.zeros((), dtype=torch.float64)
    mean_and_rank = torch.stack([mean, torch.ones_like(mean)])
    dist.all_reduce(mean_and_rank)
    return (mean_and_rank[0] / mean_and_rank[1]).item()


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
