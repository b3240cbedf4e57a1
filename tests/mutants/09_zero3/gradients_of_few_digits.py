"""The mean gradient of a part has compute_dtype's digits in the optimizer, as the part has.

caught by: ZeRO3 · bf16
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, units=None, compute_dtype=None, **options):
        super().__init__(module.to(compute_dtype) if compute_dtype else module, units, **options)
