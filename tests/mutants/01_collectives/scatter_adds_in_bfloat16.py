"""Sends bfloat16 to halve the bytes: the sums keep only about three digits.

caught by: ring_reduce_scatter · values
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor.to(torch.bfloat16), group).to(tensor.dtype)
