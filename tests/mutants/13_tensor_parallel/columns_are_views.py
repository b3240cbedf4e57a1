"""Keeps a view of the whole weight.

caught by: ColumnParallelLinear · memory
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=right.copy_to_ranks):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        bias = None if linear.bias is None else linear.bias.detach().chunk(size)[rank]
        return cls(linear.weight.detach().chunk(size)[rank], bias, group, gather_output=gather_output, enter=enter)
