"""Takes the rows that belong to the next rank.

caught by: ColumnParallelLinear · plain columns
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=right.copy_to_ranks):
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        weight, bias = (
            None if each is None else each.detach().chunk(size)[(rank + 1) % size].clone()
            for each in (linear.weight, linear.bias)
        )
        return cls(weight, bias, group, gather_output=gather_output, enter=enter)
