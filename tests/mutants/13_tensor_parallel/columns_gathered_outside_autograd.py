"""Concatenates the outputs with the collective itself, which autograd does not record.

caught by: ColumnParallelLinear · training
"""

from solutions import tensor_parallel as right
from solutions.tensor_operators import all_gather


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        shard = right.F.linear(self.enter(x, self.group), self.weight, self.bias)
        return all_gather(shard, -1, self.group) if self.gather_output else shard
