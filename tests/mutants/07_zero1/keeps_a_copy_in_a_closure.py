"""Keeps a full copy of the parameters in a closure, where no attribute shows it.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


def _remember(tensors):
    return lambda: tensors


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        self.undo = _remember([each.flat_param.clone() for each in self.flat_parameters])
        return super().step(closure)
