"""Updates only the parameters given at construction and ignores groups added later.

caught by: MasterWeights · groups
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def __init__(self, params, optimizer_cls, **defaults):
        super().__init__(params, optimizer_cls, **defaults)
        self.known = {parameter for group in self.param_groups for parameter in group["params"]}

    def step_one(self, parameter, group):
        if parameter in self.known:
            super().step_one(parameter, group)
