"""Reduces a unit that is called twice after the backward of only one call.

caught by: ZeRO3 · awkward models
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def post_backward(self, unit, call):
        unit.open_calls.clear()
        super().post_backward(unit, call)
