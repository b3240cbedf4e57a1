"""Keeps a full copy of the parameters in lists of Python floats.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = [each.flat_param.tolist() for each in self.flat_parameters]
        return loss
