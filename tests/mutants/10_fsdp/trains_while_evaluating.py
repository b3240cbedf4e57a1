"""Switches the module to train mode in every forward, even after `eval()`.

caught by: ZeRO3 · awkward models
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        self.module.train()
        return super().forward(*inputs, **kwargs)
