"""Calls the closure where autograd records nothing.

caught by: ZeRO1 · loops
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)
