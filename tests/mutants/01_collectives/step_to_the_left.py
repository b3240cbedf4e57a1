"""Sends to the left neighbor and receives from the right one.

caught by: ring_step · values
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right_ = (rank - 1) % world_size, (rank + 1) % world_size
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=right_)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=left)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
