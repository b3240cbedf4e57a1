"""Accepts no keyword arguments in forward.

caught by: ZeRO3 · a module
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs):
        return super().forward(*inputs)
