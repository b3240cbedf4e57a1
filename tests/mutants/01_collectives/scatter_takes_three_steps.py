"""Runs at most three steps, which is right for up to four ranks only.

caught by: ring_reduce_scatter · more ranks
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = right.chunks_of(tensor.contiguous(), world_size)
    partial = chunks[(rank - 1) % world_size].clone()
    for step in range(1, min(world_size, 4)):
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        right.ring_step(partial, arrived, group)
        partial = arrived + mine
    return torch.nn.functional.pad(partial, (0, chunks[0].numel() - partial.numel()))
