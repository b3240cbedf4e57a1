"""Runs the closure of step() a second time: the gradients are the same, but BatchNorm counts two batches.

caught by: ShardedOptimizer · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)
