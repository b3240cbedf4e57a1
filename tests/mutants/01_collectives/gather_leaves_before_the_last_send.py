"""Waits only for the receives: the last shard may be overwritten before it has been sent.

caught by: ring_all_gather · waits
"""

import torch.distributed as dist

from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401

_in_flight = []


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered = shard.new_empty(world_size, shard.numel())
    gathered[rank] = shard
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        _in_flight.append(dist.isend(gathered[outgoing], group=group, group_dst=(rank + 1) % world_size))
        dist.recv(gathered[incoming], group=group, group_src=(rank - 1) % world_size)
    return gathered.view(-1)
