"""Also broadcasts every parameter from rank 0 after the step.

caught by: ZeRO1 · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            dist.broadcast(parameter.detach(), group=self.group, group_src=0)
        return loss
