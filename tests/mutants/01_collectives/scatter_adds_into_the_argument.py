"""A student saves memory where it is not theirs.

caught by: ring_reduce_scatter · argument
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from solutions import collectives as right


def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = right.chunks_of(tensor.contiguous(), world_size)
    for step in range(1, world_size):
        mine = chunks[(rank - step - 1) % world_size]
        arrived = torch.empty_like(mine)
        right.ring_step(chunks[(rank - step) % world_size], arrived, group)
        mine += arrived
    return F.pad(chunks[rank], (0, chunks[0].numel() - chunks[rank].numel()))


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
