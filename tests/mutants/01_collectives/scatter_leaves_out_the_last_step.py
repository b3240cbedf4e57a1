"""Runs N − 2 steps instead of N − 1: every sum misses one rank's contribution.

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
    for step in range(1, world_size - 1):
        arrived = torch.empty_like(chunks[0])
        right.ring_step(chunks[(rank - step) % world_size], arrived, group)
        chunks[(rank - step - 1) % world_size] += arrived
    return chunks[rank]
