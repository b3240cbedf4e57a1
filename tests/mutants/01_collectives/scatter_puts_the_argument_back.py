"""Accumulates in the argument and restores it afterwards: that takes two extra passes and invalidates tensors that
autograd has saved.

caught by: ring_reduce_scatter · argument
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    before, chunks = tensor.clone(), right.chunks_of(tensor.contiguous(), world_size)
    for step in range(1, world_size):
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        right.ring_step(chunks[(rank - step) % world_size], arrived, group)
        mine.add_(arrived)
    missing = chunks[0].numel() - chunks[rank].numel()
    shard = torch.nn.functional.pad(chunks[rank], (0, missing)).clone()
    tensor.copy_(before)
    return shard
