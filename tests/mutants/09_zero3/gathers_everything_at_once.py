"""Gathers the whole model when forward begins.

caught by: GathersForForward · memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        for unit in self.units.values():
            unit.wait()
        return super().forward(*inputs, **kwargs)
