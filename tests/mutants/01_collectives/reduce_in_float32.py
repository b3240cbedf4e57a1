"""Reduces bfloat16 tensors in float32: more precise, but twice the bytes.

caught by: ring_all_reduce · wire
"""

import torch

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    total = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
    right.ring_all_reduce(total, group)
    tensor.copy_(total)
