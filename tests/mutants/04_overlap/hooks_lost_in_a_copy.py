"""A copy made by deepcopy has no hooks: right values, and nothing overlaps.

caught by: OverlappedDDP · lives
"""

from torch import nn

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def __setstate__(self, state):
        nn.Module.__setstate__(self, state)
