"""Runs forward a second time without gradients: BatchNorm updates its running statistics twice per step.

caught by: ManualDDP · values
"""

import torch

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def forward(self, *inputs, **kwargs):
        with torch.no_grad():
            super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)
