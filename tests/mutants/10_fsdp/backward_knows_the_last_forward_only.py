"""Looks up every unit in the last forward, although it may belong to an earlier one.

caught by: ZeRO3 · several forwards
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def pre_backward(self, unit, call):
        if unit is not self.root:
            self.prefetcher.called.index(unit)
        super().pre_backward(unit, call)
