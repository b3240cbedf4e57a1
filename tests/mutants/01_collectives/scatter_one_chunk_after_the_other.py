"""Reduces the chunks one after the other: the ring's bytes and messages, but no two chunks in flight at once.

caught by: ring_reduce_scatter · at once
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401 - unchanged


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = right.chunks_of(tensor.contiguous(), world_size)
    result = None
    for owner, chunk in enumerate(chunks):
        total = chunk.clone()
        if rank != (owner + 1) % world_size:
            arrived = torch.empty_like(chunk)
            dist.recv(arrived, group=group, group_src=(rank - 1) % world_size)
            total += arrived
        if rank != owner:
            dist.send(total, group=group, group_dst=(rank + 1) % world_size)
        else:
            result = total
    return torch.nn.functional.pad(result, (0, chunks[0].numel() - result.numel()))
