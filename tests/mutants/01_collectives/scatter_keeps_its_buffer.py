"""A student makes the result's memory once, for all calls.

caught by: ring_reduce_scatter · result
"""

import torch

from solutions import collectives as right

_kept = {}


def ring_reduce_scatter(tensor, group=None):
    shard = right.ring_reduce_scatter(tensor, group)
    return _kept.setdefault((shard.shape, shard.dtype), torch.empty_like(shard)).copy_(shard)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
