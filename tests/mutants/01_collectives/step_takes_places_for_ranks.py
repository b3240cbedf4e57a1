"""Computes the neighbors' ranks within the group but uses them as global ranks.

caught by: ring_step · group
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size, group)
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size, group)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
