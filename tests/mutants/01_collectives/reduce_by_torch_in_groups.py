"""Uses the ring without a group, but torch's `all_reduce` when a group is given.

caught by: ring_all_reduce · wire
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_all_reduce(tensor, group=None):
    if group is None:
        right.ring_all_reduce(tensor)
    else:
        dist.all_reduce(tensor, group=group)
