"""Reuses one result buffer for all calls, so a call overwrites the previous result.

caught by: ring_reduce_scatter · result
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401

_kept = {}


def ring_reduce_scatter(tensor, group=None):
    shard = right.ring_reduce_scatter(tensor, group)
    return _kept.setdefault((shard.shape, shard.dtype), torch.empty_like(shard)).copy_(shard)
