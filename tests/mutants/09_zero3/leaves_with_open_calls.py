"""A unit that is called twice is left after the first.

caught by: ReducesGradients · values
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_backward(self, unit, call, gradient):
        for each in self.entered:
            each.open.clear()
        super()._before_backward(unit, call, gradient)
