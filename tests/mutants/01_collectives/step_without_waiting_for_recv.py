"""A student waits for the message that is sent only.

caught by: ring_step · waits
"""

import torch.distributed as dist

from solutions import collectives as right

_under_way = []


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    _under_way.append(dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size))
    dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
