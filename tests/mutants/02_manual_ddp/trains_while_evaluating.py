"""Switches the module to train mode in every forward, even after `eval()`.

caught by: ManualDDP · values
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def forward(self, *inputs, **kwargs):
        self.module.train()
        return super().forward(*inputs, **kwargs)
