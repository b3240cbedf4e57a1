"""Runs each forward in eval mode and restores the modes afterwards: dropout drops nothing.

caught by: ZeRO3 · awkward models
"""

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
