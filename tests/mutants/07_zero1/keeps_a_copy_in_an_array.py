"""Keeps a full copy of the parameters in NumPy arrays, inside a closure.

caught by: ZeRO1 · memory
"""

from solutions import zero1 as right


def _remember(arrays):
    return lambda: arrays


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        self.undo = _remember([each.flat_param.float().cpu().numpy().copy() for each in self.flat_parameters])
        return loss
