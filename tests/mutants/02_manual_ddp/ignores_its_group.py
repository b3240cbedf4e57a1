"""Ignores its group and communicates with all ranks.

caught by: ManualDDP · group
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def __init__(self, module, group=None):
        super().__init__(module, None)
