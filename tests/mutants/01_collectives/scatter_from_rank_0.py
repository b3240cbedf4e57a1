"""Sums everything on rank 0, which then sends out the shards: one rank does all the work.

caught by: ring_reduce_scatter · wire
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    total, arrived = tensor.clone(), torch.empty_like(tensor)
    shards = [shard.clone() for shard in right.chunks_of(total, world_size)]
    if rank > 0:
        dist.send(total, group=group, group_dst=0)
        dist.recv(shards[rank], group=group, group_src=0)
        return shards[rank]
    for other in range(1, world_size):
        dist.recv(arrived, group=group, group_src=other)
        total += arrived
    for other in range(1, world_size):
        dist.send(right.chunks_of(total, world_size)[other], group=group, group_dst=other)
    return right.chunks_of(total, world_size)[0].clone()
