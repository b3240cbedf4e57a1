"""Gathers all that is to come.

caught by: LooksAhead · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _begin_to_gather(self, following):
        for unit in following:
            unit.begin_gather()
