"""A student gathers all tensors everywhere and picks one out: N times the bytes.

caught by: pass_right · wire
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
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, tensor)
    return tensors[dist.get_rank() - 1]


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item() if dist.get_rank() == 0 else None
