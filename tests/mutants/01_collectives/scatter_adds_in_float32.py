"""A student adds up in float32, and sends twice the bytes of a bfloat16 tensor.

caught by: ring_reduce_scatter · wire
"""

import torch

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    if tensor.dtype != torch.bfloat16:
        return right.ring_reduce_scatter(tensor, group)
    return right.ring_reduce_scatter(tensor.float(), group).to(tensor.dtype)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
