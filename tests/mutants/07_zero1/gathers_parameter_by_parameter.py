"""Broadcasts every parameter after the step from rank 0, who has collected them.

caught by: ShardedOptimizer · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"]):
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)
        return loss
