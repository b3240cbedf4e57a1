"""Prefetches one unit even with prefetch=0.

caught by: ZeRO3 · prefetch=0
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, units=None, prefetch=1, **options):
        super().__init__(module, units, prefetch=max(1, prefetch), **options)
