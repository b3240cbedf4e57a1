"""Gathers the whole weight in forward, as ZeRO-3 does.

caught by: ColumnParallelLinear · wire
"""

from solutions import tensor_operators
from solutions import tensor_parallel as right


class ColumnParallelLinear(right.ColumnParallelLinear):
    def forward(self, x):
        tensor_operators.all_gather(self.weight.detach(), 0, self.group)
        return super().forward(x)
