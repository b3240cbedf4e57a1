"""Adds a barrier before each step.

caught by: ZeRO1 · wire
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        dist.barrier(self.group)
        return super().step(closure)
