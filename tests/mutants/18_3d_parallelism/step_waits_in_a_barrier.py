"""Waits for all ranks in a barrier, which nothing needs.

caught by: Parallel3D · wire
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def step(self, inputs, targets):
        loss = super().step(inputs, targets)
        dist.barrier()
        return loss
