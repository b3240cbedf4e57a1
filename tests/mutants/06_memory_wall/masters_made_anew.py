"""Makes the master anew from the parameter, whose digits are gone.

caught by: MasterWeights · small updates
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        self.state[parameter].pop("master", None)
        super().step_one(parameter, group)
