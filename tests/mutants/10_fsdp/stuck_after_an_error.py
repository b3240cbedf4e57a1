"""Rejects every forward after one that failed.

caught by: ZeRO3 · several forwards
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    is_inside = False

    def forward(self, *inputs, **kwargs):
        if self.is_inside:
            raise RuntimeError("a forward is running")
        self.is_inside = True
        output = super().forward(*inputs, **kwargs)
        self.is_inside = False
        return output
