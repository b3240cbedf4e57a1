"""Runs an extra forward without gradients before the first step, which BatchNorm counts as a batch.

caught by: OverlappedDDP · values
"""

import torch

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    is_first = True

    def forward(self, *inputs, **kwargs):
        if self.is_first:
            self.is_first = False
            with torch.no_grad():
                self.module(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)
