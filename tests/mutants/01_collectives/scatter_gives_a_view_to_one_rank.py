"""A student gives a rank alone its own memory back: the next step writes into its gradient.

caught by: ring_reduce_scatter · result
"""

import torch.distributed as dist

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    if dist.get_world_size(group) == 1:
        return tensor.reshape(-1)
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
