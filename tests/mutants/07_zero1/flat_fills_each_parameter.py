"""Fills up every parameter to a multiple of the ranks, not their sum.

caught by: FlatParameters · layout
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def _sizes(self):
        size = dist.get_world_size(self.group)
        return [-(-each.numel() // size) * size for each in self.parameters]

    def new_flat(self):
        return self.parameters[0].new_zeros(sum(self._sizes()))

    def slices_of(self, flat):
        parts = flat.split(self._sizes())
        pairs = zip(parts, self.parameters, strict=True)
        return [part[: each.numel()].view(each.shape) for part, each in pairs]
