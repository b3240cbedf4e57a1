"""A student sends the sum and the count one after the other.

caught by: global_mean · wire
"""

import torch
import torch.distributed as dist


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def global_mean(values: torch.Tensor) -> float:
    total = values.sum(dtype=torch.float64)
    count = torch.tensor(values.numel(), dtype=torch.float64)
    dist.all_reduce(total)
    dist.all_reduce(count)
    return (total / count).item()


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
