"""Waits for the send too late: the next sum overwrites the buffer that is still being sent.

caught by: ring_reduce_scatter · waits
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    size = -(-tensor.numel() // world_size)
    chunks = F.pad(tensor.flatten(), (0, world_size * size - tensor.numel())).view(world_size, size)
    outgoing = chunks[(rank - 1) % world_size].clone()
    arrived = torch.empty_like(outgoing)
    for step in range(1, world_size):
        handle = dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size)
        dist.recv(arrived, group=group, group_src=(rank - 1) % world_size)
        outgoing.copy_(arrived + chunks[(rank - step - 1) % world_size])
        handle.wait()
    return outgoing
