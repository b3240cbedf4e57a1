"""Uses recursive halving, which takes fewer steps but works only if the number of ranks is a power of two.

caught by: ring_reduce_scatter · values
"""

import torch
import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    part, half = tensor.clone().view(-1), world_size // 2
    while half:
        keep, give = part.chunk(2) if not rank & half else part.chunk(2)[::-1]
        arrived = torch.empty_like(keep)
        handle = dist.isend(give.contiguous(), group=group, group_dst=rank ^ half)
        dist.recv(arrived, group=group, group_src=rank ^ half)
        handle.wait()
        part, half = keep + arrived, half // 2
    return part
