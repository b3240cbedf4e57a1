"""A student's `reshape` copies where memory is not contiguous, and the sum is left in the copy.

caught by: ring_all_reduce · layout
"""

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    flat = tensor.reshape(-1)
    flat = flat if flat.is_contiguous() else flat.clone()
    right.ring_all_reduce(flat, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
