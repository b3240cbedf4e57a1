"""Clears the inner optimizer's state before every step.

caught by: ZeRO1 · values
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        self.inner.state.clear()
        return super().step(closure)
