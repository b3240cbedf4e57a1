"""Gives each slice its parameter's strides, so channels_last parameters are laid out in a different order.

caught by: flat_and_slices · values
"""

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    flat, slices = right.flat_and_slices(parameters)
    return flat, [
        flat.as_strided(p.shape, p.stride(), s.storage_offset()) for p, s in zip(parameters, slices, strict=True)
    ]
