"""A student gathers all ranks' tensors on every rank, and adds up the chunk there.

caught by: ring_reduce_scatter · wire
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everything = right.ring_all_gather(tensor.flatten(), group).view(world_size, -1)
    return right.chunks_of(everything.sum(0), world_size)[rank]


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
