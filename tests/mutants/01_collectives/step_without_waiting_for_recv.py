"""Waits only for the send: the incoming tensor may not have been received yet.

caught by: ring_step · waits
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401

_in_flight = []


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    _in_flight.append(dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size))
    dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
