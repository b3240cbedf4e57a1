"""Only the first rank adds the bias: the output is right, but the other ranks never update theirs.

caught by: RowParallelLinear · plain rows
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return self.leave(right.F.linear(x, self.weight, bias), self.group)
