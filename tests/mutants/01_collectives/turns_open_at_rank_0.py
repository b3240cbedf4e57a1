"""A student lets rank 0 alone receive last: nothing hangs, and each waits for its left neighbour in turn.

caught by: ring_step_in_turns · turns
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right_ = (rank - 1) % world_size, (rank + 1) % world_size
    if rank == 0:
        dist.send(outgoing, group=group, group_dst=right_)
    dist.recv(incoming, group=group, group_src=left)
    if rank > 0:
        dist.send(outgoing, group=group, group_dst=right_)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
