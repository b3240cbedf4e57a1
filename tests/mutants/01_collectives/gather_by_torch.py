"""A student calls what the exercise asks to build.

caught by: ring_all_gather · wire
"""

import torch
import torch.distributed as dist

from solutions import collectives as right


def ring_all_gather(shard, group=None):
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
