"""Skips a parameter that was frozen after backward, although it has a gradient. torch's optimizers do not.

caught by: MasterWeights · no gradient
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        if parameter.requires_grad:
            super().step_one(parameter, group)
