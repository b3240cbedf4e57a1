"""A student gives the sum back, where the caller looks into the tensor.

caught by: ring_all_reduce · values
"""

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    gathered = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    tensor = gathered[: tensor.numel()].view(tensor.shape)
    return tensor


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
