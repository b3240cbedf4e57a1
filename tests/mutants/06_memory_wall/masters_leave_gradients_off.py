"""Disables gradients in step() and never enables them again, so the next backward() has no graph.

caught by: MasterWeights · values
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step(self, closure=None):
        loss = closure() if closure else None
        torch.set_grad_enabled(False)
        super().step()
        return loss
