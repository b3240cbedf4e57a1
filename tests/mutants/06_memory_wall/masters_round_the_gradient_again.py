"""Rounds the gradient of a float32 parameter to bfloat16.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        given = parameter.grad
        parameter.grad = given.bfloat16().to(given.dtype)
        super().step_one(parameter, group)
        parameter.grad = given
