"""Divides by N when averaging, and once more afterwards.

caught by: ManualDDP · plain model
"""

import torch.distributed as dist

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def finish_gradient_sync(self):
        super().finish_gradient_sync()
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= dist.get_world_size(self.group)
