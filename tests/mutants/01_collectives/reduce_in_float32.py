"""A student adds up a bfloat16 tensor in float32: better digits, and twice the bytes.

caught by: ring_all_reduce · wire
"""

import torch

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    total = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
    right.ring_all_reduce(total, group)
    tensor.copy_(total)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
