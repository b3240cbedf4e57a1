"""A student does not fill up the last shards: ranks hold shards of different lengths.

caught by: ring_reduce_scatter · sizes
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    mine = right.chunks_of(tensor.contiguous(), dist.get_world_size(group))[dist.get_rank(group)]
    return right.ring_reduce_scatter(tensor, group)[: mine.numel()].clone()


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
