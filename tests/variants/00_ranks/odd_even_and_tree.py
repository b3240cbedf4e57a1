"""Sends first on even ranks and receives first on odd ones, reduces the loss to rank 0, and broadcasts along a tree."""

import torch
import torch.distributed as dist


def sum_over_ranks(value: float) -> float:
    total = torch.full((1,), value, dtype=torch.float64)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return float(total)


def global_mean(values: torch.Tensor) -> float:
    pair = torch.zeros(2, dtype=torch.float64, device=values.device)
    for value in values.tolist():
        pair += torch.tensor([value, 1.0], dtype=torch.float64, device=values.device)
    dist.all_reduce(pair)
    return pair[0].item() / pair[1].item()


def pass_right(tensor: torch.Tensor) -> torch.Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = tensor.clone()
    if size == 1:
        return received
    if rank % 2 == 0:
        dist.send(tensor, dst=(rank + 1) % size)
    dist.recv(received, src=(rank - 1) % size)
    if rank % 2 == 1:
        dist.send(tensor, dst=(rank + 1) % size)
    return received


def log_mean_loss(loss: torch.Tensor) -> float | None:
    total = loss.detach().double()
    dist.reduce(total, dst=0)
    if dist.get_rank() == 0:
        return total.item() / dist.get_world_size()


def broadcast_by_hand(tensor: torch.Tensor, src: int) -> None:
    """In each round, send the tensor from every rank that has it to one that does not."""
    size = dist.get_world_size()
    index = (dist.get_rank() - src) % size
    reach = 1
    while reach < size:
        if index < reach and index + reach < size:
            dist.send(tensor, dst=(index + reach + src) % size)
        elif reach <= index < 2 * reach:
            dist.recv(tensor, src=(index - reach + src) % size)
        reach *= 2
