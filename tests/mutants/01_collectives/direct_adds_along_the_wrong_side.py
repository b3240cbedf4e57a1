"""Sums elements that are adjacent in memory instead of the contributions of the ranks.

caught by: direct_reduce_scatter · values
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def direct_reduce_scatter(tensor, group=None):
    world_size = dist.get_world_size(group)
    parts = F.pad(tensor.flatten(), (0, -tensor.numel() % world_size))
    mine = torch.empty_like(parts)
    dist.all_to_all_single(mine, parts, group=group)
    return mine.view(-1, world_size).sum(1) if mine.numel() else mine
