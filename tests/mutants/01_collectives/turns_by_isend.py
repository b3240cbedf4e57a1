"""Launches the send of an even rank with isend, so that the rank receives in the same turn.

caught by: ring_step_in_turns · turns
"""

import torch.distributed as dist


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank % 2 == 0:
        sent = dist.isend(outgoing, group=group, group_dst=right)
    dist.recv(incoming, group=group, group_src=left)
    if rank % 2 == 0:
        sent.wait()
    else:
        dist.send(outgoing, group=group, group_dst=right)
