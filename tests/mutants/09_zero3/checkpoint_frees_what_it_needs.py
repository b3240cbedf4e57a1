"""A forward that is computed again in backward ends as any other.

caught by: ReducesGradients · checkpoints
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _after_forward(self, unit, module, inputs, output):
        if unit is not self.root:
            self._called(unit, output)
            unit.reshard()
        else:
            super()._after_forward(unit, module, inputs, output)
