"""Sends everything received so far in every step: N times the bytes.

caught by: ring_all_gather · wire
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered = shard.new_zeros(world_size, shard.numel())
    gathered[rank] = shard
    for _ in range(world_size - 1):
        arrived = torch.empty_like(gathered)
        right.ring_step(gathered, arrived, group)
        gathered = torch.where(gathered.any(1, keepdim=True), gathered, arrived)
    return gathered.view(-1)
