"""Lab 00's circle: each rank adds up in the order in which tensors come, and rounds in its own way.

caught by: ring_all_reduce · same bits
"""

import torch
import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_reduce(tensor, group=None):
    whole = tensor.contiguous()
    travelling = whole.clone()
    for _ in range(dist.get_world_size(group) - 1):
        arrived = torch.empty_like(travelling)
        right.ring_step(travelling, arrived, group)
        whole += arrived
        travelling = arrived
    if whole is not tensor:
        tensor.copy_(whole)
