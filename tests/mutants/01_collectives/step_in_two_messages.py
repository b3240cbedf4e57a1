"""Sends the length before the tensor, although the receiver already knows it.

caught by: ring_step · wire
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step(outgoing, incoming, group=None):
    length, theirs = torch.tensor([outgoing.numel()]), torch.zeros(1, dtype=torch.int64)
    right.ring_step(length, theirs, group)
    assert theirs.item() == incoming.numel()
    right.ring_step(outgoing, incoming, group)
