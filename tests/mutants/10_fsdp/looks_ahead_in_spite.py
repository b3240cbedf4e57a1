"""Keeps prefetching in the previous forward's order after this forward has diverged from it.

caught by: ZeRO3 · prefetched wire
"""

from solutions import zero3 as right


class Prefetcher(right.Prefetcher):
    def in_forward(self, unit):
        self.called.append(unit)
        self._unshard(self.expected[len(self.called) :])


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.prefetcher = Prefetcher(self.prefetcher.units_ahead)
