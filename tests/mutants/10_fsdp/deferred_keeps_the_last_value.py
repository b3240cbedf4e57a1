"""Keeps the values of the last parameter while the next one is drawn.

caught by: Materializer · memory
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        dtype = layout.parameters[0].dtype
        shard = torch.zeros(layout.shard_shape, dtype=dtype, device=self.device)
        begin = dist.get_rank(layout.group) * shard.numel()
        for parameter in layout.parameters:
            first, last = max(begin, 0), min(begin + shard.numel(), parameter.numel())
            if first < last:
                value = self.value_of(parameter)
                shard[first - begin : last - begin] = value.flatten()[first:last]
            begin -= parameter.numel()
        return shard
