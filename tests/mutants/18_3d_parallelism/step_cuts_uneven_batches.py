"""Gives some replicas fewer samples if a batch cannot be divided evenly.

caught by: Parallel3D · rejections
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        return batch.chunk(self.replicas)[dist.get_rank(self.dp_group)]
