"""What a forward has gathered and no backward has freed is computed with after a step.

caught by: ReducesGradients · several forwards
"""

import torch

from solutions import zero3 as right


class ZeRO3(right.ZeRO3):
    def forward(self, *inputs, **kwargs):
        if self.pending:
            self.finish_gradient_sync()
        units, self.units = self.units, {}
        output = super().forward(*inputs, **kwargs)
        self.units = units
        if not torch.is_grad_enabled():
            for unit in units.values():
                unit.reshard()
        return output
