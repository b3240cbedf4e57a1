"""A student fills in the shards of all others.

caught by: ring_all_gather · values
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered, travelling = shard.new_zeros(world_size, shard.numel()), shard
    for step in range(1, world_size):
        arrived = gathered[(rank - step) % world_size]
        right.ring_step(travelling, arrived, group)
        travelling = arrived
    return gathered.view(-1)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
