"""Multiplies in int8's neighborhood: converts the scales to integers first.

caught by: dequantize · values
"""

from solutions import compression as right


def dequantize(integers, scales):
    blocks = integers.unflatten(-1, (-1, right.BLOCK))
    return (blocks * scales.unsqueeze(-1).int()).flatten(-2).float()
