"""Keeps all parameters as they were in storages, whose tensors are gone.

caught by: ZeRO2 · memory
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def step(self):
        self.undo = [bucket.home.flat.detach().clone().untyped_storage() for bucket in self.buckets]
        super().step()
