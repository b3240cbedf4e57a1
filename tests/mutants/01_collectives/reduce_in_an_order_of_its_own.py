"""Passes whole tensors around the ring, as in lab 00: each rank adds them in its own order and rounds differently.

caught by: ring_all_reduce · same bits
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    outgoing = whole.clone()
    for _ in range(dist.get_world_size(group) - 1):
        arrived = torch.empty_like(outgoing)
        right.ring_step(outgoing, arrived, group)
        whole += arrived
        outgoing = arrived
    if whole is not tensor:
        tensor.copy_(whole)
