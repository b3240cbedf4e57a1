"""A student counts neighbours within the group, and addresses them as global ranks.

caught by: ring_step · group
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    receive = dist.P2POp(dist.irecv, incoming, (rank - 1) % world_size, group)
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % world_size, group)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
