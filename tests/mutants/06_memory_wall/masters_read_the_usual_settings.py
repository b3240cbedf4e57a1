"""Reads lr, weight_decay, betas and momentum in each step, but all other settings only once.

caught by: MasterWeights · schedulers
"""

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        known = {name: group[name] for name in ("lr", "weight_decay", "betas", "momentum") if name in group}
        super().step_one(parameter, {**self.inner.defaults, **known})
