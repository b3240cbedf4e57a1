"""The root goes after forward, and backward needs it first.

caught by: GathersForForward · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _after_forward(self, unit, module, inputs, output):
        super()._after_forward(unit, module, inputs, output)
        if unit is self.root:
            unit.reshard()
