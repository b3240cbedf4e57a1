"""Leaves out the samples that are left over.

caught by: Parallel3D · rejections
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        count, index = len(batch) // self.replicas, dist.get_rank(self.dp_group)
        return batch[index * count : (index + 1) * count]
