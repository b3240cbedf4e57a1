"""Takes a closure and keeps its loss to itself.

caught by: ShardedOptimizer · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        super().step(closure)
