"""Unshards the whole model at the start of forward.

caught by: ZeRO3 · forward memory
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        for unit in self.units:
            unit.wait_for_unshard()
        return super().forward(*inputs, **kwargs)
