"""Compares only the current call with the previous forward, so it prefetches again after the order has changed.

caught by: Prefetcher · changing order
"""

from solutions.prefetching import Prefetcher as Right


class Prefetcher(Right):
    def in_forward(self, unit):
        self.called.append(unit)
        index = len(self.called) - 1
        if self.expected[index : index + 1] == [unit]:
            self._unshard(self.expected[index + 1 :])
