"""Converts the scale to float32 after the division, so bf16 values are rounded twice.

caught by: quantize · awkward blocks
"""

import torch

from solutions import compression as right


def quantize(values):
    blocks = values.unflatten(-1, (-1, right.BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=right.TINY)
    integers = (blocks / scales).round().to(torch.int8)
    return integers.flatten(-2), scales.squeeze(-1).float()
