"""Converts the parameters to float32, so that sums are more precise.

caught by: ZeRO2 · bf16
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __init__(self, module, *args, **kwargs):
        module.float()
        super().__init__(module, *args, **kwargs)
