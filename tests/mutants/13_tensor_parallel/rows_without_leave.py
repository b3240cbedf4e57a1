"""Returns the partial sum.

caught by: RowParallelLinear · plain rows
"""

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        return right.F.linear(x, self.weight, self.bias)
