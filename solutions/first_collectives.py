# Built by `make notebooks` from source/00_ranks/lab.py: edit that, not this.
"""First collectives: functions that all ranks call together."""

import torch
import torch.distributed as dist
from torch import Tensor


def sum_over_ranks(value: float) -> float:
    """Add up one number per rank; every rank gets the sum.

    Comm: one all_reduce of 8 bytes.
    """
    # torch's default, float32, would keep 7 digits.
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def global_mean(values: Tensor) -> float:
    """Average the values of all ranks; each value counts once.

    Shapes: values: [any number, 0 too]
    Comm: one all_reduce of 16 bytes.
    """
    mine = [values.sum(dtype=torch.float64), values.numel()]
    sum_and_count = torch.tensor(mine, dtype=torch.float64, device=values.device)
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return total / count


def pass_right(tensor: Tensor) -> Tensor:
    """Send tensor to the right neighbour; give back the left neighbour's.

    Comm: one message out and one in, each of tensor's bytes.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()  # a rank may not send to itself
    received = torch.empty_like(tensor)
    # Both are launched before either is waited for: nobody waits in a circle.
    to_right = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    from_left = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for handle in dist.batch_isend_irecv([to_right, from_left]):
        handle.wait()
    return received


def log_mean_loss(loss: Tensor) -> float | None:
    """Average the ranks' losses for rank 0 to log; the others get None.

    Shapes: loss: []
    Comm: one all_reduce of loss's bytes.
    """
    mean = loss.detach().clone()  # all_reduce works in place; loss is wanted
    dist.all_reduce(mean)  # on every rank, or rank 0 would wait for ever
    mean /= dist.get_world_size()
    return mean.item() if dist.get_rank() == 0 else None


def broadcast_by_hand(tensor: Tensor, src: int) -> None:
    """Replace tensor, in place, by rank src's.

    Comm: world_size − 1 messages of tensor's bytes, over all ranks.
    """
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, dst=other)
