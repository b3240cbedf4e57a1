"""Looks for each unit among those of the last forward: it may be of one before.

caught by: ReducesGradients · several forwards
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_backward(self, unit, call, gradient):
        if unit is not self.root:
            self.called.index(unit)
        super()._before_backward(unit, call, gradient)
