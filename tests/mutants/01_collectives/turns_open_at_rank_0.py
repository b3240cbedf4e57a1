"""Breaks the cycle only at rank 0: nothing hangs, but each rank waits in turn for its left neighbor.

caught by: ring_step_in_turns · turns
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right_ = (rank - 1) % world_size, (rank + 1) % world_size
    if rank == 0:
        dist.send(outgoing, group=group, group_dst=right_)
    dist.recv(incoming, group=group, group_src=left)
    if rank > 0:
        dist.send(outgoing, group=group, group_dst=right_)
