"""Skips parameters whose gradient is all zeros: weight decay and momentum should still change them.

caught by: MasterWeights · no gradient
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        if parameter.grad.any():
            super().step_one(parameter, group)
