"""A student takes the global rank for the place in the group.

caught by: ring_all_gather · group
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(), dist.get_world_size(group)
    gathered = shard.new_zeros(world_size, shard.numel())
    gathered[rank % world_size] = shard
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        right.ring_step(gathered[outgoing], gathered[incoming], group)
    return gathered.view(-1)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
