"""Keeps a copy of all parameters in NumPy arrays, where no tensor shows it.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def step(self):
        self.undo = [bucket.flat_parameter.flat_param.float().cpu().numpy().copy() for bucket in self.buckets]
        super().step()
