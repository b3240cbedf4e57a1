"""Repeats the scales in the wrong order: element after element instead of block after block.

caught by: dequantize · values
"""

import torch


def dequantize(integers, scales):
    repeats = integers.shape[-1] // scales.shape[-1]
    return integers * torch.cat([scales] * repeats, -1)
