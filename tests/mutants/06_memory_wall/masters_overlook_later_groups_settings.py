"""Gives a group added later the settings of the first group.

caught by: MasterWeights · groups
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def add_param_group(self, param_group):
        if self.param_groups and hasattr(self, "built"):
            param_group = {**self.param_groups[0], "params": param_group["params"]}
        super().add_param_group(param_group)

    def __init__(self, params, optimizer_cls, **defaults):
        super().__init__(params, optimizer_cls, **defaults)
        self.built = True
