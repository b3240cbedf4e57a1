"""Sends before receiving on every rank, as in published code: each rank waits until its neighbor receives, a deadlock.

caught by: ring_step · values
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
    dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
