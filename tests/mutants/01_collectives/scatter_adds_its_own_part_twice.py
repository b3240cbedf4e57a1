"""Adds the rank's own chunk a second time to the finished sum.

caught by: ring_reduce_scatter · values
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank = dist.get_rank(group)
    mine = right.chunks_of(tensor, dist.get_world_size(group))[rank]
    return mine + right.ring_reduce_scatter(tensor, group)
