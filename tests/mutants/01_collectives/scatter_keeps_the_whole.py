"""Returns a view into a copy of the whole tensor: the shard keeps all of that memory alive.

caught by: ring_reduce_scatter · result
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    padded = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    rows = padded.clone().view(world_size, padded.numel() // world_size)
    for step in range(1, world_size):
        arrived = torch.empty_like(rows[0])
        right.ring_step(rows[(rank - step) % world_size], arrived, group)
        rows[(rank - step - 1) % world_size] += arrived
    return rows[rank]
