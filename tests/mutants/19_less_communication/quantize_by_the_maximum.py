"""Takes the largest value of a block instead of the largest absolute value.

caught by: quantize · random values
"""

import torch

from solutions import compression as right


def quantize(values):
    blocks = values.unflatten(-1, (-1, right.BLOCK))
    scales = (blocks.amax(-1, keepdim=True) / 127).float().clamp(min=right.TINY)
    return (blocks / scales).round().clamp(-127, 127).to(torch.int8).flatten(-2), scales.squeeze(-1)
