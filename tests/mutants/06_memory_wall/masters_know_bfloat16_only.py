"""Rounds every low-precision parameter to bfloat16, so float16 parameters lose three bits of precision.

caught by: MasterWeights · values
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        if parameter.dtype != torch.float32:
            parameter.copy_(self.state[parameter]["master"].bfloat16())
