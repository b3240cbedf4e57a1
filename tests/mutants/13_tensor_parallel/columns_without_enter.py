"""Does not pass the inputs through the operator, so their gradient stays partial.

caught by: ColumnParallelLinear · plain columns
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        shard = right.F.linear(x, self.weight, self.bias)
        return right.concatenate_shards(shard, self.group) if self.gather_output else shard
