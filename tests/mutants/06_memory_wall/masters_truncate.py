"""Truncates masters to bfloat16 instead of rounding them.

caught by: MasterWeights · values
"""

import torch

from solutions import memory_wall as right


class MasterWeights(right.MasterWeights):
    def step_one(self, parameter, group):
        super().step_one(parameter, group)
        if parameter.dtype == torch.bfloat16:
            bits = self.state[parameter]["master"].contiguous().view(torch.int32).bitwise_and(-65536)
            parameter.copy_(bits.view(torch.float32))
