"""Takes the learning rate of now, and the betas of the start.

caught by: MasterWeights · schedulers
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        self.first = getattr(self, "first", {})
        settings = self.first.setdefault(parameter, dict(group))
        super().step_one(parameter, {**settings, "lr": group["lr"]})
