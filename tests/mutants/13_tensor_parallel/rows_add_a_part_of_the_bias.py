"""Every rank adds an N-th of the bias: the output is right, but the bias's gradient is N times too small.

caught by: RowParallelLinear · plain rows
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        bias = None if self.bias is None else self.bias / dist.get_world_size(self.group)
        return self.leave(right.F.linear(x, self.weight, bias), self.group)
