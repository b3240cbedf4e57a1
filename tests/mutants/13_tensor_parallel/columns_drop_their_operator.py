"""Does not pass `enter` on, so the layer always has the operator of tensor parallelism.

caught by: ColumnParallelLinear · operators
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    @classmethod
    def from_linear(cls, linear, group=None, gather_output=False, enter=right.copy_to_ranks):
        return super().from_linear(linear, group, gather_output)
