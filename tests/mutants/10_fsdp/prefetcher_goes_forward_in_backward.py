"""Prefetches in forward order during backward.

caught by: Prefetcher · backward
"""

from solutions import zero3 as right


class Prefetcher(right.Prefetcher):
    def in_backward(self, unit):
        if unit in self.called:
            self._unshard([each for each in self.called[self.called.index(unit) + 1 :] if each.open_calls])
