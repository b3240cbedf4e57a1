"""Fills in the shards of all other ranks but not the rank's own.

caught by: ring_all_gather · values
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered, outgoing = shard.new_zeros(world_size, shard.numel()), shard
    for step in range(1, world_size):
        arrived = gathered[(rank - step) % world_size]
        right.ring_step(outgoing, arrived, group)
        outgoing = arrived
    return gathered.view(-1)
