"""Splits rows with `tensor.chunk` instead of splitting elements evenly: 10 rows over 4 ranks give 3, 3, 3 and 1, and 6
rows give only three chunks.

caught by: ring_reduce_scatter · sizes
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = [chunk.clone() for chunk in tensor.chunk(world_size)]
    for step in range(1, world_size):
        arrived = torch.empty_like(chunks[(rank - step - 1) % world_size])
        right.ring_step(chunks[(rank - step) % world_size], arrived, group)
        chunks[(rank - step - 1) % world_size] += arrived
    return chunks[rank].flatten()
