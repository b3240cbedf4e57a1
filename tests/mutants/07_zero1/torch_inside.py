"""Cheats by deriving from torch's ZeroRedundancyOptimizer, and averages the gradients first.

caught by: ZeRO1 · values
"""

import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


class ZeRO1(ZeroRedundancyOptimizer):
    def __init__(self, params, optimizer_cls, group=None, **defaults):
        super().__init__(params, optimizer_cls, process_group=group, **defaults)

    def step(self, closure=None):
        for parameter in (p for each in self.param_groups for p in each["params"]):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.process_group)
                parameter.grad /= dist.get_world_size(self.process_group)
        return super().step(closure)
