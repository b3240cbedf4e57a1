"""Takes the storage for the tensor: a piece from the middle of a larger one is not where it looks.

caught by: ring_all_reduce · layout
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - right as they are


def ring_all_reduce(tensor, group=None):
    right.ring_all_reduce(torch.as_strided(tensor, (tensor.numel(),), (1,), 0), group)
