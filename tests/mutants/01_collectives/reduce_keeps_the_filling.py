"""A student copies the gathered chunks back with `resize_`, and the filling comes along.

caught by: ring_all_reduce · sizes
"""

from solutions import collectives as right


def ring_all_reduce(tensor, group=None):
    gathered = right.ring_all_gather(right.ring_reduce_scatter(tensor, group), group)
    if gathered.numel() == tensor.numel():
        tensor.copy_(gathered.view_as(tensor))
    else:
        tensor.resize_(gathered.shape).copy_(gathered)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
