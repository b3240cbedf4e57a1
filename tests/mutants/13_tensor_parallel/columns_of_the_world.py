"""Splits over all ranks instead of those of the group.

caught by: ColumnParallelLinear · group
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=right.copy_to_ranks):
        layer = super().from_linear(linear, None, gather_output=gather_output, enter=enter)
        layer.group = group
        return layer
