"""Puts all gradients into a single bucket, whatever the cap.

caught by: ZeRO2 · peak
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, optimizer_cls, 1e6, group, **defaults)
