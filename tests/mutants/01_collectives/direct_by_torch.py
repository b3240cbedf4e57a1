"""Calls torch's `reduce_scatter`, which is a single call as well.

caught by: direct_reduce_scatter · wire
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def direct_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    parts = F.pad(tensor.flatten(), (0, -tensor.numel() % world_size)).view(world_size, -1)
    shard = torch.empty_like(parts[0])
    dist.reduce_scatter(shard, list(parts), group=group)
    return shard
