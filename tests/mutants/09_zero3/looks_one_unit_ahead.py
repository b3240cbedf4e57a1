"""Looks one unit ahead, though it may look further.

caught by: LooksAhead · order
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _begin_to_gather(self, following):
        super()._begin_to_gather(following[:1])
