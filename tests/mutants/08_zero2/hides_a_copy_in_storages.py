"""Keeps a copy of all parameters in storages without a tensor.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def step(self):
        self.undo = [bucket.flat_parameter.flat_param.clone().untyped_storage() for bucket in self.buckets]
        super().step()
