"""Remembers which samples of the first batch were its own, although later batches may have more.

caught by: Parallel3D · every mesh
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        if len(batch) % self.replicas:
            raise ValueError(f"a batch of {len(batch)} samples cannot be split over {self.replicas} replicas")
        if not hasattr(self, "own"):
            count, index = len(batch) // self.replicas, dist.get_rank(self.dp_group)
            self.own = slice(index * count, (index + 1) * count)
        return batch[self.own]
