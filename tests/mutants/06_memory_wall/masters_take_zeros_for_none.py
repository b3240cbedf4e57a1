"""Takes a gradient of zeros for none: weight decay and momentum would have moved the parameter.

caught by: MasterWeights · no gradient
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        if parameter.grad.any():
            super().step_one(parameter, group)
