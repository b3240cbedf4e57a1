"""Sets the others' parts to zero and adds everything up: right, at twice the price.

caught by: FlatParameters · gather
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def gather(self):
        mine = self.shard.detach().clone()
        with torch.no_grad():
            self.flat.zero_()
            self.shard.copy_(mine)
        return dist.all_reduce(self.flat.detach(), group=self.group, async_op=True)
