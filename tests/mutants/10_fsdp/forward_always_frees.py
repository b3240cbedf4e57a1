"""Reshards every unit after forward, even with reshard_after_forward=False.

caught by: ZeRO3 · states
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_forward(self, unit, submodule, inputs, output):
        super().post_forward(unit, submodule, inputs, output)
        if unit is not self.root and unit.state is not right.UnitState.BACKWARD:
            unit.reshard()
