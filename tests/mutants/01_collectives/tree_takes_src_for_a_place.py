"""Uses `src` as a rank within the group although it is a global rank. In the default group the two are the same.

caught by: tree_broadcast · group
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401


def tree_broadcast(tensor, src=0, group=None):
    world_size = dist.get_world_size(group)
    src = src if group is None else dist.get_global_rank(group, src % world_size)
    right.tree_broadcast(tensor, src, group)
