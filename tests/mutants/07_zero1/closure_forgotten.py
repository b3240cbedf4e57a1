"""Calls the closure but does not return its loss.

caught by: ZeRO1 · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        super().step(closure)
