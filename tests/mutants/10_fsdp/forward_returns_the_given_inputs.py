"""Watches the inputs of each unit, but does not return them, so post_backward() is never called.

caught by: ZeRO3 · backward hooks
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def pre_forward(self, unit, submodule, inputs, kwargs):
        super().pre_forward(unit, submodule, inputs, kwargs)
