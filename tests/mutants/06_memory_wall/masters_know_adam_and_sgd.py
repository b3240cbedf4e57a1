"""Keeps only the state that Adam and SGD use and drops that of any other optimizer.

caught by: MasterWeights · values
"""

from solutions import memory_wall as right

KNOWN = ("master", "step", "exp_avg", "exp_avg_sq", "momentum_buffer")


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        state = self.state[parameter]
        for name in [name for name in state if name not in KNOWN]:
            del state[name]
