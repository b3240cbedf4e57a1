"""Gathers the full state on every rank and then drops it on all ranks but one.

caught by: ZeRO1 · other ranks' memory
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict()
        return gathered if to in (None, dist.get_rank(self.group)) else None
