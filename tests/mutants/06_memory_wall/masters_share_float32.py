"""Makes a float32 parameter its own master, because .float() does not copy it.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        self.state[parameter].setdefault("master", parameter.detach().float())
        super().step_one(parameter, group)
