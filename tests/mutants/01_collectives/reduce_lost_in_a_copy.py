"""Reduces a copy of a non-contiguous tensor, made by `reshape`, and never copies the sum back.

caught by: ring_all_reduce · layout
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    flat = tensor.reshape(-1)
    flat = flat if flat.is_contiguous() else flat.clone()
    right.ring_all_reduce(flat, group)
