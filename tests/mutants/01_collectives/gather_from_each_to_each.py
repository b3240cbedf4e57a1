"""Sends the shard directly to every other rank: the same number of bytes, but not around a ring.

caught by: ring_all_gather · wire
"""

import torch.distributed as dist

from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    gathered = shard.new_empty(world_size, shard.numel())
    gathered[rank] = shard
    handles = []
    for other in set(range(world_size)) - {rank}:
        handles.append(dist.irecv(gathered[other], group=group, group_src=other))
        handles.append(dist.isend(shard.contiguous(), group=group, group_dst=other))
    for handle in handles:
        handle.wait()
    return gathered.view(-1)
