"""Pads by resizing the tensor in place, which overwrites whatever follows it in memory.

caught by: ring_all_reduce · layout
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    world_size, shape, numel = dist.get_world_size(group), tensor.shape, tensor.numel()
    size = -(-numel // world_size)
    tensor.resize_(world_size * size)
    tensor[numel:] = 0
    shard = right.ring_reduce_scatter(tensor, group)
    chunks = list(tensor.view(world_size, size))
    chunks[dist.get_rank(group)].copy_(shard)
    right.gather_around(chunks, group)
    tensor.resize_(shape)
