"""Makes every rank except rank 0 receive before it sends: only one message is in flight at a time.

caught by: ring_step · at once
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
    dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
    if rank != 0:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
