"""Turns bf16 parameters into float32 ones: right to more digits, at twice the bytes.

caught by: ShardedOptimizer · bf16
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _lay_out(self, parameters):
        for each in parameters:
            if each.dtype == torch.bfloat16:
                each.data = each.data.float()
        return super()._lay_out(parameters)
