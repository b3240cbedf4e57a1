"""Deals the samples out in turn, so the parts are not contiguous. Means over the batch stay the same.

caught by: Parallel3D · ZeRO-1
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def own_part(self, batch):
        if len(batch) % self.replicas:
            raise ValueError(f"a batch of {len(batch)} samples cannot be split over {self.replicas} replicas")
        return batch[dist.get_rank(self.dp_group) :: self.replicas]
