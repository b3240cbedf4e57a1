"""Breaks an odd cycle only at rank 0: three turns for three ranks, five for five.

caught by: ring_step_in_turns · more ranks
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    begins = rank % 2 == 0 if world_size % 2 == 0 else rank == 0
    if begins:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
    dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)
    if not begins:
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)
