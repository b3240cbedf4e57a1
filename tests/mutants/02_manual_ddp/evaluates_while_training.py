"""Runs each forward in eval mode and restores the modes afterwards: dropout drops nothing.

caught by: ManualDDP · values
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def forward(self, *inputs, **kwargs):
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        try:
            return super().forward(*inputs, **kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
