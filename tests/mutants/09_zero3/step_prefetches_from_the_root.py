"""Lets the root prefetch the next unit, as other units do.

caught by: PrefetchingZeRO3 · prefetched order
"""

from solutions.zero3 import ZeRO3


class PrefetchingZeRO3(ZeRO3):
    def __init__(self, module, units=None, prefetch=1, group=None):
        super().__init__(module, units, prefetch=prefetch, group=group)

    def pre_forward(self, unit, submodule, inputs, kwargs):
        if unit is self.root:
            unit.wait_for_unshard()
            self.prefetcher.in_forward(unit)
        return super().pre_forward(unit, submodule, inputs, kwargs)
