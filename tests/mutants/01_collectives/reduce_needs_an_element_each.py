"""Rejects tensors with fewer elements than ranks.

caught by: ring_all_reduce · sizes
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    if tensor.numel() < dist.get_world_size(group):
        raise ValueError("the tensor is too small to be cut")
    right.ring_all_reduce(tensor, group)
