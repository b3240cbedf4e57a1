"""Remembers all parameters in float32 as they were, where no attribute shows it: in a closure.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


def _remember(tensors):
    return lambda: tensors


class ZeRO2(right.ZeRO2):
    def step(self):
        self.undo = _remember([bucket.home.flat.detach().float().clone() for bucket in self.buckets])
        super().step()
