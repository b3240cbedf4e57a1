"""Keeps no masters and updates the bfloat16 parameters directly.

caught by: MasterWeights · values
"""

import torch


class MasterWeights(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **defaults):
        self.inner = optimizer_cls(list(params), **defaults)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups = self.inner.param_groups

    def add_param_group(self, param_group):
        if hasattr(self, "param_groups") and len(self.param_groups) < len(self.inner.param_groups):
            return super().add_param_group(dict(param_group))
        self.inner.add_param_group(param_group)

    def step(self, closure=None):
        return self.inner.step(closure)
