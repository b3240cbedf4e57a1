"""Sends to the right neighbor, but also receives from it, which works only if there are two ranks.

caught by: ring_step · values
"""

import torch.distributed as dist


def ring_step(outgoing, incoming, group=None):
    right = (dist.get_rank(group) + 1) % dist.get_world_size(group)
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=right)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
