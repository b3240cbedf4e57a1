"""Prefetches in forward order during backward.

caught by: Prefetcher · backward
"""

from solutions import prefetching as right


class Prefetcher(right.Prefetcher):
    def in_backward(self, unit, unreached=()):
        if unit in self.called:
            after = self.called[self.called.index(unit) + 1 :]
            self._unshard([each for each in after if each not in unreached])
