"""Adds a barrier before and after every step.

caught by: ring_step · wire
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_step(outgoing, incoming, group=None):
    dist.monitored_barrier(group)
    right.ring_step(outgoing, incoming, group)
    dist.monitored_barrier(group)
