"""Always uses rank 0 of the group as the root and ignores `src`.

caught by: tree_broadcast · values
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401


def tree_broadcast(tensor, src=0, group=None):
    first = 0 if group is None else dist.get_global_rank(group, 0)
    right.tree_broadcast(tensor, first, group)
