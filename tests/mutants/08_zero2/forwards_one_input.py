"""Accepts only a single positional input in forward.

caught by: ZeRO2 · wrapping
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def forward(self, x):
        return self.module(x)
