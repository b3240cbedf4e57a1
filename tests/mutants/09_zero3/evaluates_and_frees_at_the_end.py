"""Frees units of a forward without gradients when the whole forward has ended.

caught by: LooksAhead · memory
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def _after_forward(self, unit, module, inputs, output):
        if torch.is_grad_enabled() or not self.prefetch:
            super()._after_forward(unit, module, inputs, output)
