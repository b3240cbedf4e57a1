"""Backward never learns that it reaches a unit.

caught by: ZeRO3 · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _watch_outputs(self, unit, output):
        self.calls.pop(unit)
