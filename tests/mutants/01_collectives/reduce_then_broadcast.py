"""Reduce, then broadcast, in disguise: both along trees, whole tensors each time.

caught by: ring_all_reduce · wire
"""

import torch
import torch.distributed as dist

from solutions import collectives as right


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


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
