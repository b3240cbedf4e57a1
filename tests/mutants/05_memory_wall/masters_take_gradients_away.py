"""Drops gradients when they are used, which is zero_grad()'s work.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def _step_one(self, parameter, group):
        super()._step_one(parameter, group)
        parameter.grad = None
