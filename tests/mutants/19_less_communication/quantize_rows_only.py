"""Expects values of at most two dimensions.

caught by: quantize · random values
"""

import torch

from solutions import compression as right


def quantize(values):
    rows = values if values.dim() > 1 else values[None]
    blocks = rows.view(len(rows), -1, right.BLOCK)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).float().clamp(min=right.TINY)
    integers, scales = (blocks / scales).round().to(torch.int8).view(values.shape), scales.squeeze(-1)
    return integers, scales if values.dim() > 1 else scales[0]
