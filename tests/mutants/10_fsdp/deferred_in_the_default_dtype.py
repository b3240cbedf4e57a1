"""Allocates the shard in the default dtype.

caught by: Materializer · plain model
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        shard = torch.zeros(layout.shard_shape, dtype=torch.get_default_dtype(), device=self.device)
        begin = dist.get_rank(layout.group) * shard.numel()
        for parameter in layout.parameters:
            if -shard.numel() < begin < parameter.numel():
                own = self.value_of(parameter).flatten()[max(begin, 0) : begin + shard.numel()]
                first = max(-begin, 0)
                shard[first : first + own.numel()] = own
            begin -= parameter.numel()
        return shard
