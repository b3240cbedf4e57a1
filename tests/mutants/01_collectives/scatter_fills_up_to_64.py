"""Pads every chunk to a multiple of 64 elements and sends the padding too.

caught by: ring_reduce_scatter · wire
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = right.chunks_of(tensor.contiguous(), world_size)
    size = chunks[0].numel()
    chunks = [F.pad(chunk, (0, -(-size // 64) * 64 - chunk.numel())) for chunk in chunks]
    partial = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        arrived = torch.empty_like(partial)
        right.ring_step(partial, arrived, group)
        partial = arrived + chunks[(rank - step - 1) % world_size]
    return partial[:size].clone()
