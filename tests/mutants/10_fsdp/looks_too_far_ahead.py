"""Prefetches all remaining units.

caught by: ZeRO3 · prefetched memory
"""

from solutions import zero3 as right


class Prefetcher(right.Prefetcher):
    def _unshard(self, following):
        for unit in following:
            unit.unshard()


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.prefetcher = Prefetcher(self.prefetcher.units_ahead)
