"""A student sends the shard to every other rank: as many bytes, but not around a ring.

caught by: ring_all_gather · wire
"""

import torch.distributed as dist

from solutions import collectives as right


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


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
