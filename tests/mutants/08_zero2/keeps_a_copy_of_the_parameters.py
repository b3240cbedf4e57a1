"""Keeps a float32 copy of all parameters in a closure, where no attribute shows it.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


def _remember(tensors):
    return lambda: tensors


class ZeRO2(right.ZeRO2):
    def step(self):
        self.undo = _remember([bucket.flat_parameter.flat_param.float().clone() for bucket in self.buckets])
        super().step()
