"""Ignores gather_output.

caught by: ColumnParallelLinear · training
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        self.gather_output = False
        return super().forward(x)
