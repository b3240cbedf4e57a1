"""Runs forward a second time without gradients: BatchNorm updates its running statistics twice per step.

caught by: ZeRO2 · awkward models
"""

import torch

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def forward(self, *inputs, **kwargs):
        with torch.no_grad():
            super().forward(*inputs, **kwargs)
        return super().forward(*inputs, **kwargs)
