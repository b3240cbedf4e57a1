"""Uses a plain ZeRO1 optimizer in addition to the buckets: it moves the parameters to its own flat tensors, whose
gradients no bucket computes.

caught by: ZeRO2 · same start
"""

from solutions import zero2 as right
from solutions.zero1 import ZeRO1


class ZeRO2(right.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, optimizer_cls, bucket_cap_mb, group, **defaults)
        self.optimizer = ZeRO1(module.parameters(), optimizer_cls, group, **defaults)
