"""Without gradients, the root stays.

caught by: GathersForForward · memory
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        self.expected, self.called = self.called, []
        return right.ReducesGradients.forward(self, *inputs, **kwargs)

    def _after_forward(self, unit, module, inputs, output):
        if unit is not self.root or torch.is_grad_enabled():
            super()._after_forward(unit, module, inputs, output)
