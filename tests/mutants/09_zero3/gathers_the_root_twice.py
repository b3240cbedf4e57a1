"""The root is resharded after forward, too.

caught by: ReducesGradients · wire
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _after_forward(self, unit, module, inputs, output):
        super()._after_forward(unit, module, inputs, output)
        if unit is self.root and unit.state is not right.UnitState.BACKWARD:
            unit.reshard()
