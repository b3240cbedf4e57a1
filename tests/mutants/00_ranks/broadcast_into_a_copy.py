"""A student receives into a new tensor, and the caller's stays as it was.

caught by: broadcast_by_hand · values
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
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item() if dist.get_rank() == 0 else None


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> torch.Tensor:
    if dist.get_rank() != src:
        received = torch.empty_like(tensor)
        dist.recv(received, src=src)
        return received
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, dst=other)
    return tensor
