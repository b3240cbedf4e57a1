"""A student starts the sum with the rank's own part, and adds it again when the others' have come.

caught by: ring_reduce_scatter · values
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    rank = dist.get_rank(group)
    mine = right.chunks_of(tensor, dist.get_world_size(group))[rank]
    return mine + right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
