"""Implements all-reduce as a tree reduce and a tree broadcast, which send whole tensors in each round.

caught by: ring_all_reduce · wire
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    whole, distance = tensor.contiguous(), 1
    while distance < world_size:
        if rank % (2 * distance) == distance:
            dist.send(whole, group=group, group_dst=rank - distance)
        elif rank % (2 * distance) == 0 and rank + distance < world_size:
            arrived = torch.empty_like(whole)
            dist.recv(arrived, group=group, group_src=rank + distance)
            whole += arrived
        distance *= 2
    first = 0 if group is None else dist.get_global_rank(group, 0)
    right.tree_broadcast(whole, first, group)
    if whole is not tensor:
        tensor.copy_(whole)
