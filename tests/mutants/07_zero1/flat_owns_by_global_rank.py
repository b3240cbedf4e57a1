"""Takes the part of its rank in the world, in a group of fewer.

caught by: FlatParameters · layout
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def own(self, flat):
        size = dist.get_world_size(self.group)
        return flat.view(size, -1)[dist.get_rank() % size]
