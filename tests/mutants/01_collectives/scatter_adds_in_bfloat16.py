"""A student halves the bytes by sending bfloat16, and the sums keep three digits.

caught by: ring_reduce_scatter · values
"""

import torch

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor.to(torch.bfloat16), group).to(tensor.dtype)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
