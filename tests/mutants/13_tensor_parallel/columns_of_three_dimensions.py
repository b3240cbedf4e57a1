"""Takes inputs of the shape (B, T, D) only.

caught by: ColumnParallelLinear · training
"""

from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        x = self.enter(x, self.group)
        batch, tokens, width = x.shape
        flat = right.F.linear(x.reshape(batch * tokens, width), self.weight, self.bias)
        own = flat.view(batch, tokens, -1)
        return right.concatenate_shards(own, self.group) if self.gather_output else own
