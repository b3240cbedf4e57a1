"""Lets a float32 parameter be its own master, for .float() copies nothing.

caught by: MasterWeights · values
"""

from torch import nn

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            master = nn.Parameter(parameter.detach().float())
            self.inner[parameter].param_groups[0]["params"] = [master]
