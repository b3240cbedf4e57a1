"""Collects every rank's whole tensor, and adds up the part that it needs.

caught by: begin_reduce_scatter · wire
"""

import torch
import torch.distributed as dist


def begin_reduce_scatter(flat, group=None):
    everyones = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    handle = dist.all_gather(everyones, flat, group=group, async_op=True)

    def finish():
        handle.wait()
        return sum(each.view(len(everyones), -1)[dist.get_rank(group)] for each in everyones)

    return finish
