"""A student calls what the exercise asks to build.

caught by: tree_broadcast · wire
"""

import torch.distributed as dist

from solutions import collectives as right


def tree_broadcast(tensor, src=0, group=None):
    dist.broadcast(tensor, src, group=group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)
