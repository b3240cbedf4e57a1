"""Waits for a prefetched all-gather before the current unit computes.

caught by: PrefetchingZeRO3 · prefetched order
"""

from solutions import prefetching, zero3


class Prefetcher(prefetching.Prefetcher):
    def _unshard(self, following):
        for unit in following[: self.units_ahead]:
            unit.wait_for_unshard()


class PrefetchingZeRO3(zero3.ZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)
        self.prefetcher = Prefetcher(prefetch)
