"""Converts to int8 without rounding first, which cuts off the fraction.

caught by: quantize · random values
"""

import torch

from solutions import compression as right


def quantize(values):
    blocks = values.unflatten(-1, (-1, right.BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).float().clamp(min=right.TINY)
    return (blocks / scales).to(torch.int8).flatten(-2), scales.squeeze(-1)
