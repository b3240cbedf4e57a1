"""Keeps the beginning of a parameter instead of the slice that lies in the shard.

caught by: Materializer · cuts
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        shard = torch.zeros(layout.shard_shape, dtype=layout.parameters[0].dtype, device=self.device)
        begin = dist.get_rank(layout.group) * shard.numel()
        for parameter in layout.parameters:
            if -shard.numel() < begin < parameter.numel():
                own = self.value_of(parameter).flatten()[
                    : min(begin + shard.numel(), parameter.numel()) - max(begin, 0)
                ]
                first = max(-begin, 0)
                shard[first : first + own.numel()] = own
            begin -= parameter.numel()
        return shard
