"""Keeps the whole parameters in float32 beside the sharded masters.

caught by: ShardedOptimizer · masters
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.masters = [each.home.flat.detach().float() for each in self.gradients]
