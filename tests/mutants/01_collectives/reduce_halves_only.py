"""Stops after the reduce-scatter: each rank has its own chunk of the sum, and old values elsewhere.

caught by: ring_all_reduce · values
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    mine = right.chunks_of(whole, dist.get_world_size(group))[dist.get_rank(group)]
    mine.copy_(right.ring_reduce_scatter(whole, group)[: mine.numel()])
    tensor.copy_(whole)
