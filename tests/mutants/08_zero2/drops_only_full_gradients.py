"""Clears only the module's gradients in zero_grad() and keeps the reduced means.

caught by: ZeRO2 · loops
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def zero_grad(self, set_to_none=True):
        self.module.zero_grad()
