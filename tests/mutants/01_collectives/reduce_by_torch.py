"""A student calls what the exercise asks to build.

caught by: ring_all_reduce · wire
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    dist.all_reduce(tensor, group=group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
