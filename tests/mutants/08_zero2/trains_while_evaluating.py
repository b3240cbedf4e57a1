"""Switches the module to train mode in every forward, even after `eval()`.

caught by: ZeRO2 · awkward models
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def forward(self, *inputs, **kwargs):
        self.module.train()
        return super().forward(*inputs, **kwargs)
