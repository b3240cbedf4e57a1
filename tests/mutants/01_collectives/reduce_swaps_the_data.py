"""Assigns the sum to `tensor.data`: the original memory, and every view of it, keeps the old values.

caught by: ring_all_reduce · values
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    total = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    tensor.data = total[: tensor.numel()].view(tensor.shape)
