"""A forward that fails leaves it in the middle of one.

caught by: ReducesGradients · several forwards
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    is_inside = False

    def forward(self, *inputs, **kwargs):
        if self.is_inside:
            raise RuntimeError("a forward is under way")
        self.is_inside = True
        output = super().forward(*inputs, **kwargs)
        self.is_inside = False
        return output
