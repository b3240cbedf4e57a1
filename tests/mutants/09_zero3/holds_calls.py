"""Holds calls whose graph is gone: backward waits for them in vain.

caught by: ReducesGradients · unused on one rank
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _called(self, unit, output):
        super()._called(unit, output)
        self.held = [*getattr(self, "held", []), *unit.open]
