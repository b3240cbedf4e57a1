"""Prefetches nothing in backward.

caught by: PrefetchingZeRO3 · prefetched order
"""

from solutions import prefetching, zero3


class Prefetcher(prefetching.Prefetcher):
    def in_backward(self, unit, unreached=()):
        pass


class PrefetchingZeRO3(zero3.ZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)
        self.prefetcher = Prefetcher(prefetch)
