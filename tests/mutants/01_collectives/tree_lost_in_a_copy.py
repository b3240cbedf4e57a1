"""A student receives into a contiguous copy, and leaves it there.

caught by: tree_broadcast · layout
"""

from solutions import collectives as right


def tree_broadcast(tensor, src=0, group=None):
    right.tree_broadcast(tensor.contiguous(), src, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)
