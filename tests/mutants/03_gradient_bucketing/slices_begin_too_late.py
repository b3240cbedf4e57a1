"""Advances the offset by the wrong parameter's size.

caught by: flat_and_slices · values
"""

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    flat, _ = right.flat_and_slices(parameters)
    slices, start = [], 0
    for parameter, last in zip(parameters, [parameters[0], *parameters], strict=False):
        slices.append(flat[start : start + parameter.numel()].view(parameter.shape))
        start = min(start + last.numel(), max(0, flat.numel() - 36))
    return flat, slices
