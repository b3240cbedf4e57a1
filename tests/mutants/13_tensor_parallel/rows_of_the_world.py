"""Adds up over all ranks instead of those of the group.

caught by: RowParallelLinear · group
"""

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        total = self.leave(right.F.linear(x, self.weight), None)
        return total if self.bias is None else total + self.bias
