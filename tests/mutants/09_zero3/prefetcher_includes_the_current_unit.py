"""Counts the current unit among the units to prefetch.

caught by: Prefetcher · plain order
"""

from solutions import prefetching as right


class Prefetcher(right.Prefetcher):
    def in_forward(self, unit):
        if self.called == self.expected[: len(self.called)]:
            self._unshard(self.expected[len(self.called) :])
        self.called.append(unit)
