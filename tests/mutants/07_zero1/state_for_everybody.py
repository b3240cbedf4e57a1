"""Returns the full state on all ranks and ignores `to`.

caught by: ZeRO1 · to one rank
"""

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        return super().state_dict()
