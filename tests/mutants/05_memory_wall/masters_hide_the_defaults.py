"""Knows only the settings that were given: OneCycleLR finds no betas.

caught by: MasterWeights · schedulers
"""

import functools

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def __init__(self, params, optimizer_cls, **defaults):
        self.inner, self.new_inner = {}, functools.partial(optimizer_cls, **defaults)
        torch.optim.Optimizer.__init__(self, params, defaults)
