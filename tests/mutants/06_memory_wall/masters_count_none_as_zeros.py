"""Treats a missing gradient as zeros: momentum and weight decay still change the parameter.

caught by: MasterWeights · no gradient
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().step(closure)
