"""Keeps the float32 gradient of each master: 16 bytes per parameter instead of 12.

caught by: MasterWeights · memory
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.gradients = {**getattr(self, "gradients", {}), parameter: parameter.grad.float()}
