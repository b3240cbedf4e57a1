"""Lets rank 0 draw everything and send the other ranks their shards.

caught by: Materializer · plain model
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        size = dist.get_world_size(layout.group)
        flat = torch.zeros(size * layout.shard_shape.numel(), dtype=layout.parameters[0].dtype, device=self.device)
        for view, parameter in zip(layout.views(flat), layout.parameters, strict=True):
            view.copy_(self.value_of(parameter))
        dist.broadcast(flat, group=layout.group, group_src=0)
        return layout.shard_of(flat).clone()
