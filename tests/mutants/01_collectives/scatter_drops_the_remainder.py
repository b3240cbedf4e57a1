"""A student cuts with `//`: what does not divide is lost.

caught by: ring_reduce_scatter · sizes
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    size = tensor.numel() // world_size
    return right.ring_reduce_scatter(tensor.flatten()[: size * world_size], group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
