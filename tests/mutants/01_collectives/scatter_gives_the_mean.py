"""Returns the mean instead of the sum.

caught by: ring_reduce_scatter · values
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group) / dist.get_world_size(group)
