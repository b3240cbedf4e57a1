"""Adds parts up among zeros.

caught by: ShardedParameters · gather
"""

import torch.distributed as dist

from solutions import zero3 as right


class ShardedParameters(right.ShardedParameters):
    def gather(self):
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        self.flat.zero_()
        self.own(self.flat).copy_(self.shard.detach())
        return dist.all_reduce(self.flat, group=self.group, async_op=True)
