"""Uses the global rank where the rank in the group is needed.

caught by: ring_all_gather · group
"""

import torch.distributed as dist

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_all_gather(shard, group=None):
    rank, world_size = dist.get_rank(), dist.get_world_size(group)
    gathered = shard.new_zeros(world_size, shard.numel())
    gathered[rank % world_size] = shard
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        right.ring_step(gathered[outgoing], gathered[incoming], group)
    return gathered.view(-1)
