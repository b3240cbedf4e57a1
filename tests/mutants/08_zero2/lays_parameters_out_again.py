"""A plain ZeRO1 beside the buckets: it moves the parameters to flat tensors of its own, which no bucket fills.

caught by: ZeRO2 · same start
"""

from solutions import zero2 as right
from solutions.zero1 import ZeRO1


class ZeRO2(right.SyncsOnce):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, bucket_cap_mb, group)
        self.optimizer = ZeRO1(module.parameters(), optimizer_cls, group, **defaults)

    clip_grad_norm_, step, zero_grad = right.ZeRO2.clip_grad_norm_, right.ZeRO2.step, right.ZeRO2.zero_grad
