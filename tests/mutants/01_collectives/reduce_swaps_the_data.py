"""The name stands for the sum now; the memory that was given, and every view of it, is as before.

caught by: ring_all_reduce · values
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - right as they are


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    total = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    tensor.data = total[: tensor.numel()].view(tensor.shape)
