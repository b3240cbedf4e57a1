"""Concatenates the shards in the order in which they arrive, which is different on every rank.

caught by: ring_all_gather · values
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    shards = [shard]
    for _ in range(dist.get_world_size(group) - 1):
        arrived = torch.empty_like(shard)
        right.ring_step(shards[-1], arrived, group)
        shards.append(arrived)
    return torch.cat(shards)
