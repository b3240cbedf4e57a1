"""Calls the closure under no_grad(), so its backward() has no graph.

caught by: ZeRO1 · loops
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)
