"""Reads the current learning rate but keeps all other settings, such as betas, from the first step.

caught by: MasterWeights · schedulers
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        self.first = getattr(self, "first", {})
        settings = self.first.setdefault(parameter, dict(group))
        super().step_one(parameter, {**settings, "lr": group["lr"]})
