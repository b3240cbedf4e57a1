"""Adds everything up everywhere, and gives back a part of it.

caught by: begin_reduce_scatter · wire
"""

import torch.distributed as dist


def begin_reduce_scatter(flat, group=None):
    handle = dist.all_reduce(flat, group=group, async_op=True)

    def finish():
        handle.wait()
        return flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)].clone()

    return finish
