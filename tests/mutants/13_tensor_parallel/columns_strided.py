"""Takes every N-th row, so that concatenated outputs come in another order.

caught by: ColumnParallelLinear · plain columns
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=right.copy_to_ranks):
        own = slice(dist.get_rank(group), None, dist.get_world_size(group))
        bias = None if linear.bias is None else linear.bias.detach()[own].clone()
        return cls(linear.weight.detach()[own].clone(), bias, group, gather_output=gather_output, enter=enter)
