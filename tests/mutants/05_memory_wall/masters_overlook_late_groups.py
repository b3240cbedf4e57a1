"""Makes masters when it is built, and none for a group that comes later.

caught by: MasterWeights · groups
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def __init__(self, params, optimizer_cls, **defaults):
        super().__init__(params, optimizer_cls, **defaults)
        self.known = set(self.inner)

    def step_one(self, parameter, group):
        if parameter in self.known:
            super().step_one(parameter, group)
