"""Divides the length with `//` and drops the remaining elements.

caught by: ring_reduce_scatter · sizes
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    size = tensor.numel() // world_size
    return right.ring_reduce_scatter(tensor.flatten()[: size * world_size], group)
