"""Fills up with a whole part more where nothing is missing.

caught by: FlatParameters · layout
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def new_flat(self):
        size, numel = dist.get_world_size(self.group), sum(each.numel() for each in self.parameters)
        return self.parameters[0].new_zeros((numel // size + 1) * size)
