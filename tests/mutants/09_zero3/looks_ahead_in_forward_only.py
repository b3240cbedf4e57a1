"""In backward, each unit is gathered when it is its turn.

caught by: LooksAhead · order
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _before_backward(self, unit, call, gradient):
        right.ReducesGradients._before_backward(self, unit, call, gradient)
