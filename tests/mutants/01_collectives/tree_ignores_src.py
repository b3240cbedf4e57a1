"""A student's tree has its root at rank 0, whatever src is.

caught by: tree_broadcast · values
"""

import torch.distributed as dist

from solutions import collectives as right


def tree_broadcast(tensor, src=0, group=None):
    first = 0 if group is None else dist.get_global_rank(group, 0)
    right.tree_broadcast(tensor, first, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)
