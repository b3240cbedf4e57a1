"""Calls torch's differentiable all-reduce, whose backward is an all-reduce as well.

caught by: sum_over_ranks · plain sum
"""

import torch.distributed as dist
import torch.distributed.nn


def sum_over_ranks(partial, group=None):
    return torch.distributed.nn.functional.all_reduce(partial, group=group or dist.group.WORLD)
