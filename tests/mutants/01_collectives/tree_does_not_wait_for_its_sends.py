"""Returns without waiting for the sends: `src` may change its tensor before it has been sent.

caught by: tree_broadcast · waits
"""

import torch.distributed as dist

from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter  # noqa: F401

_in_flight = []


def tree_broadcast(tensor, src=0, group=None):
    group = dist.group.WORLD if group is None else group
    world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    index, reach, whole = (dist.get_rank(group) - root) % world_size, 1, tensor.contiguous()
    while reach < world_size:
        if index < reach and index + reach < world_size:
            _in_flight.append(dist.isend(whole, group=group, group_dst=(index + reach + root) % world_size))
        elif reach <= index < 2 * reach:
            dist.recv(whole, group=group, group_src=(index - reach + root) % world_size)
        reach *= 2
    if whole is not tensor:
        tensor.copy_(whole)
