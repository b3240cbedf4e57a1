"""Builds the inner optimizers anew in each step: momentum never grows.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        (master,) = self.inner[parameter].param_groups[0]["params"]
        self.inner[parameter] = self.new_inner([{**group, "params": [master]}])
        super().step_one(parameter, group)
