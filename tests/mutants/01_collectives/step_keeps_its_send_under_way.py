"""Sends a copy and never waits for that send: the values are right, but a message may still be in flight on return.

caught by: ring_step · waits
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged

kept = []


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    copy = outgoing.clone()
    kept.append((copy, dist.isend(copy, group=group, group_dst=(rank + 1) % world_size)))
    dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size).wait()
