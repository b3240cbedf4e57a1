"""Steps a parameter without a gradient as if it were zeros: momentum and weight decay move it.

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
