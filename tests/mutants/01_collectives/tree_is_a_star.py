"""Sends from `src` to each rank in turn, as in lab 00: the other ranks do not help.

caught by: tree_broadcast · wire
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401


def tree_broadcast(tensor, src=0, group=None):
    whole = tensor.contiguous()
    if dist.get_rank() == src:
        for other in dist.get_process_group_ranks(group or dist.group.WORLD):
            if other != src:
                dist.send(whole, dst=other, group=group)
    else:
        dist.recv(whole, src=src, group=group)
        tensor.copy_(whole)
