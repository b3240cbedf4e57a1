# Built by `make notebooks` from source/00_ranks/lab.py: edit that, not this.
"""First collectives: small functions that all ranks call together."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(value: float) -> float:
    """Add up one value per rank and return the sum on every rank.

    Communication: one all-reduce of 8 bytes.
    """
    # A Python float has 16 significant digits, and float32, torch's default, only 7.
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def global_mean(values: Tensor) -> float:
    """Average all values of all ranks, so that each value has the same weight.

    Args:
        values: This rank's values, of any length. It may be empty.

    Communication: one all-reduce of 16 bytes.
    """
    sum_and_count = torch.tensor(
        [values.sum(dtype=torch.float64), values.numel()], dtype=torch.float64, device=values.device
    )
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return total / count


def pass_right(tensor: Tensor) -> Tensor:
    """Send the tensor to the right neighbor and return the tensor of the left neighbor.

    Communication: each rank sends and receives one message of the tensor's size.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()  # a rank cannot send to itself
    received = torch.empty_like(tensor)
    # Launch both operations before waiting for either: if every rank first waited to receive, no rank would ever send.
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    return received


def log_mean_loss(loss: Tensor) -> float | None:
    """Average the losses of all ranks, for rank 0 to log.

    Args:
        loss: This rank's loss, a scalar. It does not change.

    Returns:
        The mean loss on rank 0, and None on the other ranks.

    Communication: one all-reduce of the size of the loss.
    """
    mean = loss.detach().clone()  # all_reduce works in place, and backward() still needs the loss
    dist.all_reduce(mean)  # every rank must call it, or rank 0 would wait forever
    mean /= dist.get_world_size()
    return mean.item() if dist.get_rank() == 0 else None


def broadcast_by_hand(tensor: Tensor, src: int) -> None:
    """Overwrite the tensor, in place, with the tensor of rank src.

    Communication: world_size − 1 messages of the tensor's size, over all ranks.
    """
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for dst in range(dist.get_world_size()):
        if dst != src:
            dist.send(tensor, dst=dst)
