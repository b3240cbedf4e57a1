"""Takes over each group's settings when it is added, and never again.

caught by: ShardedOptimizer · settings
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.reduce_gradients()
        self.inner.step()
        for handle in [each.home.gather() for each in self.gradients]:
            handle.wait()
        for each in self.gradients:
            each.home.shard.grad = None
        self.used_up = True
        return loss
