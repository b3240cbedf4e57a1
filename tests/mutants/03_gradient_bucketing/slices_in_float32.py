"""Allocates the flat tensor in the default dtype instead of the parameters' dtype.

caught by: flat_and_slices · values
"""

import torch


def flat_and_slices(parameters):
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters), device=parameters[0].device)
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return flat, [piece.view(parameter.shape) for piece, parameter in zip(pieces, parameters, strict=True)]
