"""Copies the rounded parameter into the master every 50th step, which loses small updates.

caught by: MasterWeights · small updates
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps % 50 == 0:
            self.state[parameter]["master"].copy_(parameter)
