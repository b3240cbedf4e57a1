"""Keeps a full copy of the parameters in Python's own arrays, which the garbage collector does not track.

caught by: ZeRO1 · memory
"""

from array import array

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        loss = super().step(closure)
        self.kept = [array("B", each.flat_param.float().cpu().numpy().tobytes()) for each in self.flat_parameters]
        return loss
