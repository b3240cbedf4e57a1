"""Makes the master anew from the parameter, whose digits are gone.

caught by: MasterWeights · small updates
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        inner = self.inner[parameter]
        (master,) = inner.param_groups[0]["params"]
        master.copy_(parameter)
        super().step_one(parameter, group)
