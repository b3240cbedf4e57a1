"""A plain ZeRO1 beside the buckets: it moves the parameters to flat tensors of its own, which no bucket fills.

caught by: ZeRO2 · same start
"""

from solutions import zero2 as right
from solutions.zero1 import ZeRO1


class ZeRO2(right.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, optimizer_cls, bucket_cap_mb, group, **defaults)
        self.optimizer = ZeRO1(module.parameters(), optimizer_cls, group, **defaults)
