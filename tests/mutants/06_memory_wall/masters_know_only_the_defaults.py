"""Updates every master with the default settings and ignores those of its group.

caught by: MasterWeights · groups
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, {**group, **self.defaults})
