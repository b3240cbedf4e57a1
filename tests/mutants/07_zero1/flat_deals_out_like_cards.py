"""Rank r owns every N-th number from r on: each has as many, but no part is contiguous.

caught by: FlatParameters · layout
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def own(self, flat):
        return flat.view(-1, dist.get_world_size(self.group))[:, dist.get_rank(self.group)]
