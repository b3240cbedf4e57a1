"""Drops gradients when they are used, which is zero_grad()'s work.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        parameter.grad = None
