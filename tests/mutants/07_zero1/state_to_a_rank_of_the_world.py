"""Compares `to` with the global rank instead of the rank in the group.

caught by: ZeRO1 · to one rank
"""

import torch.distributed as dist

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def state_dict(self, to=None):
        gathered = super().state_dict()
        return gathered if to in (None, dist.get_rank()) else None
