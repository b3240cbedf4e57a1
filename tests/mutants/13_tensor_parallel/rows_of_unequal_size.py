"""Splits inputs that N does not divide into parts of unequal size.

caught by: RowParallelLinear · rejections
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, leave=right.sum_over_ranks):
        weight = linear.weight.detach().tensor_split(dist.get_world_size(group), 1)[dist.get_rank(group)]
        return cls(weight.clone(), linear.bias, group, leave)
