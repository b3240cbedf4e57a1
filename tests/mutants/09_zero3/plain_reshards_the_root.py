"""Reshards the root after forward, although backward needs it first.

caught by: PlainZeRO3 · units after forward
"""

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def post_forward(self, unit, submodule, inputs, output):
        super().post_forward(unit, submodule, inputs, output)
        unit.reshard()
