"""Uses a binary heap as the tree, with children 2i + 1 and 2i + 2: the same as the right tree for up to four ranks, one
round too many for eight.

caught by: tree_broadcast · more ranks
"""

import torch
import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401 - unchanged


@torch.no_grad()
def tree_broadcast(tensor, src=0, group=None):
    group = dist.group.WORLD if group is None else group
    world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    index = (dist.get_rank(group) - root) % world_size
    whole = tensor.contiguous()
    if index:
        dist.recv(whole, group=group, group_src=((index - 1) // 2 + root) % world_size)
    for child in (2 * index + 1, 2 * index + 2):
        if child < world_size:
            dist.send(whole, group=group, group_dst=(child + root) % world_size)
    if whole is not tensor:
        tensor.copy_(whole)
