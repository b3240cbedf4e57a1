"""Divides in every backward, so that earlier micro-batches are divided again and again.

caught by: OverlappedDDP · accumulation
"""

import torch.distributed as dist

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        if not self.syncs:
            parameter.grad /= dist.get_world_size()
        super()._on_gradient(parameter)
