"""Each unit is gathered when it is its turn.

caught by: LooksAhead · order
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _begin_to_gather(self, following):
        pass
