"""Recreates the master from the rounded parameter in each step, so small updates are lost.

caught by: MasterWeights · small updates
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        self.state[parameter].pop("master", None)
        super().step_one(parameter, group)
