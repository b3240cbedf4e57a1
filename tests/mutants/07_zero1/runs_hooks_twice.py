"""Calls the step() of its base class, which runs torch's hooks on step() once more.

caught by: ZeRO1 · hooks
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = closure() if closure else None
        self.reduce_gradients()
        right.ShardedOptimizer.step(self)
        self.used_up = True
        return loss
