"""Returns zero instead of the closure's loss.

caught by: ZeRO1 · loops
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def step(self, closure=None):
        super().step(closure)
        return torch.zeros(())
