"""Alternates between two buffers for the results: the third call overwrites what the first one returned.

caught by: ring_all_gather · result
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged

buffers, calls = {}, [0]


def ring_all_gather(shard, group=None):
    gathered = right.ring_all_gather(shard, group)
    calls[0] += 1
    key = calls[0] % 2, gathered.dtype, gathered.numel()
    return buffers.setdefault(key, torch.empty_like(gathered)).copy_(gathered)
