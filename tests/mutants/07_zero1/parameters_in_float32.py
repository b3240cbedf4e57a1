"""Converts bf16 parameters to float32: more precise, at twice the bytes.

caught by: ZeRO1 · bf16
"""

import torch

from solutions import zero1 as right


class ZeRO1(right.ZeRO1):
    def _flatten(self, parameters):
        for parameter in parameters:
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        return super()._flatten(parameters)
