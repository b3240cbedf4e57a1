"""Gathers outputs with an operator that adds up gradients, although every rank has the complete one.

caught by: ColumnParallelLinear · training
"""

from solutions import tensor_operators
from solutions import tensor_parallel as right


class Concatenate(tensor_operators.ConcatenateShards):
    @staticmethod
    def backward(ctx, gradient):
        return tensor_operators.reduce_scatter(gradient, -1, ctx.group), None


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        shard = right.F.linear(self.enter(x, self.group), self.weight, self.bias)
        return Concatenate.apply(shard, self.group) if self.gather_output else shard
