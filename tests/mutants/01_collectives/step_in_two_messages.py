"""A student sends the length ahead of the tensor, as one does where it is not known.

caught by: ring_step · wire
"""

import torch

from solutions import collectives as right


def ring_step(outgoing, incoming, group=None):
    length, theirs = torch.tensor([outgoing.numel()]), torch.zeros(1, dtype=torch.int64)
    right.ring_step(length, theirs, group)
    assert theirs.item() == incoming.numel()
    right.ring_step(outgoing, incoming, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
