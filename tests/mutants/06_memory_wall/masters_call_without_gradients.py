"""Calls the closure under no_grad(), so its backward() has no graph.

caught by: MasterWeights · closure
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure else None
        super().step()
        return loss
