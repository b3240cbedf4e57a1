"""Prefetches in the order in which units are listed instead of the order of their calls.

caught by: ZeRO3 · prefetched wire
"""

from solutions import zero3 as right


class Prefetcher(right.Prefetcher):
    def in_forward(self, unit):
        self.called.append(unit)
        if self.called == self.expected[: len(self.called)]:
            self._unshard(self.units[len(self.called) :])


class ZeRO3(right.ZeRO3):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.prefetcher = Prefetcher(self.prefetcher.units_ahead)
        self.prefetcher.units = self.units
