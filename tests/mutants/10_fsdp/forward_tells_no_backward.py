"""Does not watch the outputs of units, so backward never learns that it reaches them.

caught by: ZeRO3 · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _watch_outputs(self, unit, output):
        self.calls.pop(unit)
