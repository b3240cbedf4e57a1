"""Reshards the root after forward, although backward needs it first.

caught by: ZeRO3 · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_forward(self, unit, submodule, inputs, output):
        super().post_forward(unit, submodule, inputs, output)
        if unit is self.root:
            unit.reshard()
