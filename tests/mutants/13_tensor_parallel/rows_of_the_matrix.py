"""Splits the rows of torch's weight instead of its columns.

caught by: RowParallelLinear · plain rows
"""

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, leave=right.sum_over_ranks):
        return cls(right.own_shard(linear.weight, 0, group, "the outputs"), linear.bias, group, leave)
