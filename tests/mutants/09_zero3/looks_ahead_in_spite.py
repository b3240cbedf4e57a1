"""Looks ahead in an order that is no longer that of the forward before.

caught by: LooksAhead · wire
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_forward(self, unit, module, inputs):
        right.ReducesGradients._before_forward(self, unit, module, inputs)
        if unit is not self.root and unit.state is not right.UnitState.BACKWARD:
            self.called.append(unit)
            self._begin_to_gather(self.expected[len(self.called) :])
