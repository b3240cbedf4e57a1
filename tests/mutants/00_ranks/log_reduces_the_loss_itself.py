"""A student all-reduces the loss, in place: detach() shares its memory.

caught by: log_mean_loss · argument
"""

import torch
import torch.distributed as dist


def sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


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
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() if dist.get_rank() == 0 else None
