"""A student refuses tensors with fewer elements than ranks.

caught by: ring_all_reduce · sizes
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    if tensor.numel() < dist.get_world_size(group):
        raise ValueError("the tensor is too small to be cut")
    right.ring_all_reduce(tensor, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
