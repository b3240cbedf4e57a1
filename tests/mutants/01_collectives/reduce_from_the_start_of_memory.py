"""Reads from the start of the storage and ignores the storage offset: a view into a larger tensor gets the wrong
memory.

caught by: ring_all_reduce · layout
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_all_reduce(tensor, group=None):
    right.ring_all_reduce(torch.as_strided(tensor, (tensor.numel(),), (1,), 0), group)
