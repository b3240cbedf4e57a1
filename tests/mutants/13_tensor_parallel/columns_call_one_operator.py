"""Always calls copy_to_ranks, whatever the layer's operator is.

caught by: ColumnParallelLinear · operators
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        shard = right.F.linear(right.copy_to_ranks(x, self.group), self.weight, self.bias)
        return right.concatenate_shards(shard, self.group) if self.gather_output else shard
