"""Gives each rank of the world its own samples.

caught by: Parallel3D · plain replicas
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        return batch.chunk(dist.get_world_size())[dist.get_rank()]
