"""A copy by deepcopy has no hooks.

caught by: ZeRO2 · lives
"""

from torch import nn

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def __setstate__(self, state):
        nn.Module.__setstate__(self, state)
