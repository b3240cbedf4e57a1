"""Broadcasts every parameter, and then the flat parameters that hold them once more.

caught by: ShardedOptimizer · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


def flatten_and_broadcast(parameters, group):
    for parameter in parameters:
        dist.broadcast(parameter.detach(), group=group, group_src=0)
    return right.flatten_and_broadcast(parameters, group)


class ShardedOptimizer(right.ShardedOptimizer):
    pass
