"""Registers pre_backward() for blocks only. But a forward without gradients may reshard the root before backward.

caught by: PlainZeRO3 · backward hooks
"""

from solutions.zero3 import ZeRO3


class PlainZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=0, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def _watch_outputs(self, unit, output):
        if unit is not self.root:
            super()._watch_outputs(unit, output)
