"""Turns the parameters into float32, so nothing is rounded and no memory is saved.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        parameter.data = self.state[parameter]["master"].clone()
