"""What gloo does inside: an all-reduce, of which a shard is kept.

caught by: ring_reduce_scatter · wire
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    total = tensor.clone()
    dist.all_reduce(total, group=group)
    return right.chunks_of(total, dist.get_world_size(group))[dist.get_rank(group)].clone()


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
