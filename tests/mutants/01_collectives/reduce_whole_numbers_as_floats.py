"""Sums integers in float32, which rounds integers above 2²⁴.

caught by: ring_all_reduce · dtypes
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_all_reduce(tensor, group=None):
    total = tensor if tensor.is_floating_point() else tensor.float()
    right.ring_all_reduce(total, group)
    if total is not tensor:
        tensor.copy_(total)
