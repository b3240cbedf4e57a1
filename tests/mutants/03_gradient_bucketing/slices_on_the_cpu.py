"""Allocates the flat tensor on the CPU, whatever the parameters' device.

caught by: flat_and_slices · values
"""

import torch

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype)
    return flat, [piece.view(p.shape) for piece, p in zip(flat.split(sizes), parameters, strict=True)]


BucketedDDP = right.BucketedDDP
