"""Divides the gradient of the inputs by the number of ranks.

caught by: RowParallelLinear · plain rows
"""

import torch.distributed as dist

from solutions import tensor_parallel as right


class RowParallelLinear(right.RowParallelLinear):
    def forward(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / dist.get_world_size(self.group))
        return super().forward(x)
