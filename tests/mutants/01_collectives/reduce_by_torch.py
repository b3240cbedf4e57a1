"""Calls torch's `all_reduce`, which the exercise asks to build.

caught by: ring_all_reduce · wire
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    dist.all_reduce(tensor, group=group)
