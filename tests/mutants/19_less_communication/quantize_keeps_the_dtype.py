"""Returns scales in the dtype of the values, so a float64 scale would need 8 bytes.

caught by: quantize · awkward blocks
"""

import torch

from solutions import compression as right


def quantize(values):
    blocks = values.unflatten(-1, (-1, right.BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).clamp(min=right.TINY)
    return (blocks / scales).round().to(torch.int8).flatten(-2), scales.squeeze(-1)
