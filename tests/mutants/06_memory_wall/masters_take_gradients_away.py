"""Sets each gradient to None after using it, which is the job of zero_grad().

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        parameter.grad = None
