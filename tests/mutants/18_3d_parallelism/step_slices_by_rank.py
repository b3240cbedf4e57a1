"""Chooses samples by the rank in the world, so ranks of one replica see different ones.

caught by: Parallel3D · every mesh
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        return batch.chunk(self.replicas)[dist.get_rank() % self.replicas]
