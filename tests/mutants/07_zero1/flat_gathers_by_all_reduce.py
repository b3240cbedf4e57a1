"""Zeroes the other ranks' shards and all-reduces the flat tensor: the result is right, at twice the bytes.

caught by: FlatParameter · all-gather
"""

import torch
import torch.distributed as dist

from solutions import zero1 as right


class FlatParameter(right.FlatParameter):
    def launch_all_gather(self):
        own = self.shard.detach().clone()
        with torch.no_grad():
            self.flat_param.zero_()
            self.shard.copy_(own)
        return dist.all_reduce(self.flat_param, group=self.layout.group, async_op=True)
