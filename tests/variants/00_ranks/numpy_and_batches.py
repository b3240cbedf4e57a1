"""Works on NumPy arrays, batches sends and receives, and averages losses in float64."""

import numpy as np
import torch
import torch.distributed as dist


def _all_reduced(*numbers: float) -> np.ndarray:
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor)
    return np.asarray(tensor.tolist())


def sum_over_ranks(value: float) -> float:
    return _all_reduced(value).item()


def global_mean(values: torch.Tensor) -> float:
    array = values.detach().cpu().double().numpy()
    return float(np.divide(*_all_reduced(array.sum(), array.size)))


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        return tensor.detach().clone()
    from_left = tensor.new_empty(tensor.shape)
    todo = [(dist.irecv, from_left, rank - 1), (dist.isend, tensor, rank + 1)]
    works = dist.batch_isend_irecv([dist.P2POp(call, it, peer % size) for call, it, peer in todo])
    [work.wait() for work in works]
    return from_left


def log_mean_loss(loss: torch.Tensor) -> float | None:
    mean = sum_over_ranks(loss.item()) / dist.get_world_size()
    if dist.get_rank() != 0:
        return None
    return mean


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    others = [rank for rank in range(dist.get_world_size()) if rank != src]
    me = dist.get_rank()
    works = [dist.isend(tensor, other) for other in others] if me == src else [dist.irecv(tensor, src)]
    while works:
        works.pop().wait()
