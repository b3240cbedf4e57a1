"""Lets every rank collect everything, and then throws it away on all but one.

caught by: ZeRO1 · other ranks' memory
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        collected = super().state_dict()
        return collected if to in (None, dist.get_rank(self.group)) else None
