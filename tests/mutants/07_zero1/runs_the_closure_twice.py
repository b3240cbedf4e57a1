"""Calls the closure twice and clears the gradients in between: the parameters are right, but BatchNorm counts two
batches.

caught by: ZeRO1 · loops
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        if closure is not None:
            closure()
            self.zero_grad()
        return super().step(closure)
