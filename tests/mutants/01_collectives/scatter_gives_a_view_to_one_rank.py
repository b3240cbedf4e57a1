"""Returns a view of the argument when the group has a single rank: writing to the result changes the caller's gradient.

caught by: ring_reduce_scatter · result
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    if dist.get_world_size(group) == 1:
        return tensor.reshape(-1)
    return right.ring_reduce_scatter(tensor, group)
