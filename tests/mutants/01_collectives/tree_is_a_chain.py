"""Passes the tensor along a chain of ranks: N − 1 rounds instead of ⌈log₂ N⌉.

caught by: tree_broadcast · wire
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401


def tree_broadcast(tensor, src=0, group=None):
    world = dist.group.WORLD if group is None else group
    world_size, rank = dist.get_world_size(world), dist.get_rank(world)
    index = (rank - dist.get_group_rank(world, src)) % world_size
    whole = tensor.contiguous()
    if index > 0:
        dist.recv(whole, group=world, group_src=(rank - 1) % world_size)
    if index < world_size - 1:
        dist.send(whole, group=world, group_dst=(rank + 1) % world_size)
    tensor.copy_(whole)
