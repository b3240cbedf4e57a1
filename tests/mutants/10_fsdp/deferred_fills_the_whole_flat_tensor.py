"""Materializes the whole flat tensor and cuts the shard out of it.

caught by: Materializer · memory
"""

import torch
import torch.distributed as dist

from solutions import deferred as right


class Materializer(right.Materializer):
    @torch.no_grad()
    def shard_of(self, layout):
        n, rank = layout.shard_shape.numel(), dist.get_rank(layout.group)
        values = [self.value_of(parameter).flatten() for parameter in layout.parameters]
        flat = torch.cat([*values, values[0].new_zeros(n * dist.get_world_size(layout.group) - layout.numel)])
        return flat[rank * n : (rank + 1) * n].clone()
