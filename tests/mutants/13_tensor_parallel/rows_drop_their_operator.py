"""Does not pass `leave` on, so the layer always adds up with an all-reduce.

caught by: RowParallelLinear · operators
"""

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, leave=right.sum_over_ranks):
        return super().from_linear(linear, group)
