"""Remembers the groups from construction: groups that replace them are never updated.

caught by: MasterWeights · inside another
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def __init__(self, params, optimizer_cls, **defaults):
        super().__init__(params, optimizer_cls, **defaults)
        self.groups = list(self.param_groups)

    def step(self, closure=None):
        now, self.param_groups = self.param_groups, self.groups
        super().step(closure)
        self.param_groups = now
