"""One unit ahead even with prefetch=0.

caught by: LooksAhead · without
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def __init__(self, module, units=None, prefetch=1, **options):
        super().__init__(module, units, max(1, prefetch), **options)
