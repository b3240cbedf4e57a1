"""Reduces bfloat16 tensors in float32, which doubles the bytes.

caught by: ring_reduce_scatter · wire
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    if tensor.dtype != torch.bfloat16:
        return right.ring_reduce_scatter(tensor, group)
    return right.ring_reduce_scatter(tensor.float(), group).to(tensor.dtype)
