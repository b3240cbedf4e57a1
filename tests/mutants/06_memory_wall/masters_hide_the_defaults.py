"""Exposes only the settings passed explicitly: OneCycleLR does not find the betas.

caught by: MasterWeights · schedulers
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def __init__(self, params, optimizer_cls, **defaults):
        self.inner = optimizer_cls([torch.empty(0)], **defaults)
        torch.optim.Optimizer.__init__(self, params, defaults)

    def step_one(self, parameter, group):
        super().step_one(parameter, {**self.inner.defaults, **group})
