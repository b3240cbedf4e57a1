"""A student's `reshape` copies where memory is not contiguous, and the sum is left in the copy.

caught by: ring_all_reduce · layout
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    flat = tensor.reshape(-1)
    flat = flat if flat.is_contiguous() else flat.clone()
    right.ring_all_reduce(flat, group)
