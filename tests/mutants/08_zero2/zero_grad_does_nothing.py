"""Relies on step() to drop the reduced means, so a loop that skips a step keeps them.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def zero_grad(self, set_to_none=True):
        pass
