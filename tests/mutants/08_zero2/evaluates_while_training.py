"""Runs each forward in eval mode and restores the modes afterwards: dropout drops nothing.

caught by: ZeRO2 · awkward models
"""

from solutions import zero2 as right


class ZeRO2(right.ZeRO2):
    def forward(self, *inputs, **kwargs):
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
