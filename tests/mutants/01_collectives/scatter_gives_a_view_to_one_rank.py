"""A student gives a rank alone its own memory back: the next step writes into its gradient.

caught by: ring_reduce_scatter · result
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    if dist.get_world_size(group) == 1:
        return tensor.reshape(-1)
    return right.ring_reduce_scatter(tensor, group)
