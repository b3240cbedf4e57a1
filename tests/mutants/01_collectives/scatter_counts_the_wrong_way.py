"""Increases the chunk index in each step instead of decreasing it, so chunks are added to the wrong sums.

caught by: ring_reduce_scatter · values
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size = -(-tensor.numel() // world_size)
    chunks = F.pad(tensor.flatten(), (0, world_size * size - tensor.numel())).view(world_size, size)
    partial = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        arrived = torch.empty_like(partial)
        right.ring_step(partial, arrived, group)
        partial = arrived + chunks[(rank - 1 + step) % world_size]
    return partial
