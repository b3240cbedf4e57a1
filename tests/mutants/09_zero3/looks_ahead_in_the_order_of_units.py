"""Takes the order in which units are listed for that in which they are called.

caught by: LooksAhead · wire
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_forward(self, unit, module, inputs):
        right.ReducesGradients._before_forward(self, unit, module, inputs)
        if unit is not self.root and unit.state is not right.UnitState.BACKWARD:
            self.called.append(unit)
            if self.called == self.expected[: len(self.called)]:
                self._begin_to_gather(list(self.units.values())[len(self.called) :])
