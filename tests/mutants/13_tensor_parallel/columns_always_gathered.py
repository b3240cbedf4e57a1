"""Concatenates the outputs even if nobody has asked for it.

caught by: ColumnParallelLinear · plain columns
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        self.gather_output = True
        return super().forward(x)
