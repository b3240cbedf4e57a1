"""Receives every chunk into a tensor like the first one, although the last chunks of an all-reduce may be shorter.

caught by: ring_all_gather · lengths
"""

import torch
import torch.distributed as dist

from solutions.collectives import ring_all_reduce, ring_reduce_scatter, ring_step, tree_broadcast  # noqa: F401


def gather_around(chunks, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    incoming = torch.empty_like(chunks[0])
    for step in range(world_size - 1):
        ring_step(chunks[(rank - step) % world_size], incoming, group)
        chunks[(rank - step - 1) % world_size].copy_(incoming)


@torch.no_grad()
def ring_all_gather(shard, group=None):
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)
