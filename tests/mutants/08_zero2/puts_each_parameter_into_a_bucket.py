"""Gives every parameter a bucket of its own.

caught by: ZeRO2 · wire
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults):
        super().__init__(module, optimizer_cls, 0.0, group, **defaults)
