"""Ignores compute_dtype and computes in the parameters' own dtype.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, units=None, compute_dtype=None, **options):
        super().__init__(module, units, **options)
