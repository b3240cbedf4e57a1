"""Resets the inner optimizer's state in each step, so momentum never builds up.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.state[parameter] = {"master": self.state[parameter]["master"]}
