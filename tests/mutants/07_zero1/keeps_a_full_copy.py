"""Keeps a full copy of the parameters from before the step.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        self.helper = type("Helper", (), {})()
        self.helper.before = [each.flat_param.clone() for each in self.flat_parameters]
        return super().step(closure)
