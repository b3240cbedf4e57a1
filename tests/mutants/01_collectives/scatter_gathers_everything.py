"""All-gathers the whole tensors and sums one chunk of them locally: N times the bytes.

caught by: ring_reduce_scatter · wire
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, tree_broadcast  # noqa: F401


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everything = right.ring_all_gather(tensor.flatten(), group).view(world_size, -1)
    return right.chunks_of(everything.sum(0), world_size)[rank]
