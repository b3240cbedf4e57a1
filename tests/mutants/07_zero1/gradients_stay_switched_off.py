"""Disables gradients in step() and leaves them disabled.

caught by: ZeRO1 · values
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        torch.set_grad_enabled(False)
        return loss

    def zero_grad(self, set_to_none=True):
        torch.set_grad_enabled(True)
        super().zero_grad(set_to_none)
