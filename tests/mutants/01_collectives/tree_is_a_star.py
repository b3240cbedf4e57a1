"""Lab 00's broadcast: src sends to each rank in turn, and nobody helps.

caught by: tree_broadcast · wire
"""

import torch.distributed as dist

from solutions import collectives as right


def tree_broadcast(tensor, src=0, group=None):
    whole = tensor.contiguous()
    if dist.get_rank() == src:
        for other in dist.get_process_group_ranks(group or dist.group.WORLD):
            if other != src:
                dist.send(whole, dst=other, group=group)
    else:
        dist.recv(whole, src=src, group=group)
        tensor.copy_(whole)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)
