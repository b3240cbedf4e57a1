"""Calls torch's `all_gather`, which the exercise asks to build.

caught by: ring_all_gather · wire
"""

import torch
import torch.distributed as dist

from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)
