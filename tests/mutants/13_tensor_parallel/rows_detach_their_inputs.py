"""Detaches the inputs, so the layers before this one are never trained.

caught by: RowParallelLinear · plain rows
"""

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        return super().forward(x.detach())
