"""Gathers frozen units that backward does not reach.

caught by: LooksAhead · wire
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_backward(self, unit, call, gradient):
        right.ReducesGradients._before_backward(self, unit, call, gradient)
        if unit is not self.root:
            backwards = self.called[::-1]
            self._begin_to_gather(backwards[backwards.index(unit) + 1 :])
