"""Calls torch's `broadcast`, which the exercise asks to build.

caught by: tree_broadcast · wire
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401


def tree_broadcast(tensor, src=0, group=None):
    dist.broadcast(tensor, src, group=group)
