"""Calls the closure where autograd records nothing.

caught by: ShardedOptimizer · loops
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss
