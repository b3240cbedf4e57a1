"""Uses the world size instead of the size of the group.

caught by: ring_reduce_scatter · group
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size()
    chunks = right.chunks_of(tensor.contiguous(), world_size)
    partial = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        arrived = torch.empty_like(chunks[(rank - step - 1) % world_size])
        right.ring_step(partial, arrived, group)
        partial = arrived + chunks[(rank - step - 1) % world_size]
    return F.pad(partial, (0, chunks[0].numel() - partial.numel()))
