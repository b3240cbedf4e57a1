"""Switches gradients off in step(), and never on again: the next backward() has nothing to go through.

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
