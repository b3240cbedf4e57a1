"""Calls `resize_` with the padded size, so the padding becomes part of the result.

caught by: ring_all_reduce · sizes
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    gathered = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    if gathered.numel() == tensor.numel():
        tensor.copy_(gathered.view_as(tensor))
    else:
        tensor.resize_(gathered.shape).copy_(gathered)
