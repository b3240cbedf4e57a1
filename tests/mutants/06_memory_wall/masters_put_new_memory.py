"""Assigns new memory to the parameter, so existing views keep the old values.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        parameter.data = parameter.data.clone()
