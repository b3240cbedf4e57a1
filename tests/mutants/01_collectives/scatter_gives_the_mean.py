"""A student divides, as data parallelism would later.

caught by: ring_reduce_scatter · values
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group) / dist.get_world_size(group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
