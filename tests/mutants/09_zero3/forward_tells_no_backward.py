"""Backward never learns that it reaches a unit.

caught by: GathersForForward · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _called(self, unit, output):
        pass
