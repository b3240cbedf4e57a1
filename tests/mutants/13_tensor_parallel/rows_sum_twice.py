"""Adds up over the ranks and then broadcasts the sum, which every rank already has.

caught by: RowParallelLinear · wire
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        total = super().forward(x)
        dist.broadcast(total.detach().clone(), group=self.group, group_src=0)
        return total
