"""Accepts only a single positional argument in forward.

caught by: ManualDDP · wrapping
"""

from solutions import manual_ddp as right


class ManualDDP(right.ManualDDP):
    def forward(self, x):
        return self.module(x)

    def __call__(self, x):
        return self.forward(x)
