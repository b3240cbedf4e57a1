"""Keeps prefetching in the previous forward's order after this forward has diverged from it.

caught by: Prefetcher · changing order
"""

from solutions import prefetching as right


class Prefetcher(right.Prefetcher):
    def in_forward(self, unit):
        self.called.append(unit)
        self._unshard(self.expected[len(self.called) :])
